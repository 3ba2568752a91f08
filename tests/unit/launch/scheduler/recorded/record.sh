#!/bin/bash
# Records what Slurm answers to each command that rollcall runs; README.md says where to run it.
show() { printf '$%s\n' "$(printf ' %q' "$@")"; "$@" 2>&1; printf '? %s\n' $?; }
cd "$(mktemp -d)" || exit
printf '#!/bin/bash\nsrun --ntasks=1 sleep 60\n' >job.sh
submit() { sbatch --parsable -o /dev/null "$@" job.sh; }
quick=$(sbatch --parsable -o /dev/null --wrap true)
bad=$(sbatch --parsable -o /dev/null --wrap 'kill -9 $$')
run=$(submit -N2 --gpus-per-node=a100:2)
het=$(submit -N1 -n1 : -N1 -n1)
gone=$(submit -H)
array=$(submit -H --array=0-3%2)
large=$(submit -H -p large -N1 -x n1)
sleep 5
scancel "$gone"
sleep 4
jobs=$quick,$bad,$run,$het,$gone,$array,$large
for role in quick bad run het gone array large; do printf '# %s %s\n' $role ${!role}; done
show sinfo --version
show sinfo --noconvert -h --exact -o "%P|%D|%s|%l|%a|%c|%m|%G|%B"
show sinfo -h -N -p main -o "%N"
show sinfo -h -N -o "%f"
show sinfo -h -N -p large -o "%N|%c|%m|%G|%f"
show squeue -h -r -t all -j $jobs -o "%i|%A|%T|%r|%S|%D"
show squeue -h -r -t all -j 999999 -o "%i|%A|%T|%r|%S|%D"
for job in $run $het ${array}_1; do
    show squeue -h -t all -O "State:|,Reason:|,EndTime:|,PreemptTime:" -j $job
done
show squeue -h -j $run -o "%l %M"
show squeue -h -j $run -o "%P"
show squeue -h -s -j $run -o "%i"
show squeue -h -j $run -o "%i %N"
show squeue -h -j $het -o "%i %N"
show squeue -h -j ${array}_1 -o "%A"
show squeue -h -j $large -o "%P|%n|%x|%v"
show sacct -n -P -X -j $jobs -o JobID,JobIDRaw,State,Start,NNodes
show scontrol --oneliner show job $bad
show scontrol -o show partition
show scontrol -o show reservation
show sacctmgr -nP show assoc user=root format=account
scontrol show config | grep -E '^(MaxArraySize|ClusterName) ' >config
printf '$ scontrol show config\n%s\n? 0\n' "$(<config)"
show sbatch --test-only --nodes=2 job.sh
printf '#!/bin/bash\n#SBATCH -p nowhere\n' | show sbatch --test-only
scancel $run $het $array $large
