-- A module for Lmod: `module use /opt/rollcall/env/modules; module load rollcall`.
local root = myFileName():match("^(.*)/env/modules/")
whatis("rollcall trains PyTorch models from one laptop to a cluster under Slurm")
help("rollcall submit --help; the documentation is in " .. root .. "/docs")
prepend_path("PATH", pathJoin(root, "env/modules/bin"))
setenv("ROLLCALL_HOST_COMMAND", pathJoin(root, "env/run") .. " --quiet rollcall")
