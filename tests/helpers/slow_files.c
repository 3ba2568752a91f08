/* Preloaded into a supervisor: file operations below $SLOW_ROOT wait while $SLOW_FLAG exists.

   The flag holds the seconds that each operation takes. Only the supervisor of node $SLOW_NODE is
   slow, or those of all nodes if that is empty; ranks and other processes are not. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int is_slow = -1;
static const char *root, *flag;

static int raw_read(const char *path, char *text, int size) {
    long file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (file < 0) return -1;
    long count = syscall(SYS_read, file, text, size - 1);
    syscall(SYS_close, file);
    text[count < 0 ? 0 : count] = 0;
    return (int)(count < 0 ? 0 : count);
}

static void begin(void) {
    char text[8192];
    const char *node = getenv("SLOW_NODE"), *own = getenv("SUBMITIT_LOCAL_GLOBALID");
    root = getenv("SLOW_ROOT");
    flag = getenv("SLOW_FLAG");
    int count = raw_read("/proc/self/cmdline", text, sizeof text), is_supervisor = 0;
    for (int at = 0; at < count; at += (int)strlen(text + at) + 1)
        is_supervisor |= !strcmp(text + at, "supervise");
    is_slow = root && flag && own && is_supervisor && (!node || !*node || !strcmp(node, own));
}

static void hold(const char *path) {
    char text[32];
    if (is_slow < 0) begin();
    if (!is_slow || strncmp(path, root, strlen(root)) || raw_read(flag, text, sizeof text) < 0) return;
    double seconds = atof(text), step = 0.05;
    struct timespec pause = {0, (long)(step * 1e9)};
    while (seconds > 0 && raw_read(flag, text, sizeof text) >= 0) {
        nanosleep(&pause, 0);
        seconds -= step;
    }
}

static void hold_file(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    long count = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    path[count < 0 ? 0 : count] = 0;
    hold(path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name)                                                      \
    int name(const char *path, int flags, ...) {                        \
        va_list more;                                                   \
        va_start(more, flags);                                          \
        int mode = va_arg(more, int);                                   \
        va_end(more);                                                   \
        hold(path);                                                     \
        return NEXT(name)(path, flags, mode);                           \
    }
#define PATH(type, name, parameters, words) type name parameters { hold(path); return NEXT(name) words; }
#define FILE_(type, name, parameters, words) type name parameters { hold_file(file); return NEXT(name) words; }

OPEN(open)
OPEN(open64)
PATH(int, mkdir, (const char *path, mode_t mode), (path, mode))
PATH(int, unlink, (const char *path), (path))
PATH(int, rename, (const char *path, const char *to), (path, to))
PATH(int, link, (const char *path, const char *to), (path, to))
PATH(int, access, (const char *path, int mode), (path, mode))
PATH(int, stat, (const char *path, struct stat *result), (path, result))
PATH(int, lstat, (const char *path, struct stat *result), (path, result))
FILE_(int, fsync, (int file), (file))
FILE_(ssize_t, read, (int file, void *text, size_t size), (file, text, size))
FILE_(ssize_t, write, (int file, const void *text, size_t size), (file, text, size))
FILE_(ssize_t, pread64, (int file, void *text, size_t size, off64_t at), (file, text, size, at))
FILE_(ssize_t, pwrite64, (int file, const void *text, size_t size, off64_t at), (file, text, size, at))
