#!/usr/bin/env bash
# Starts a command so that training can save a checkpoint when it is interrupted:
#   scripts/launch.sh mpirun -n 4 ./train_gpt train ...
# SIGINT (Ctrl-C), SIGTERM and SIGHUP end a run in order, but Open MPI's mpirun would kill its ranks within two seconds. So
# mpirun gets SIGUSR1, which it forwards and which has the same effect. Any other command gets the signal itself. A second Ctrl-C
# ends either at once. Exits with the command's status. Other scripts source this file and call `launch`.

# launch COMMAND...
launch() {
    local pid="" status="" ended heard interrupts=0 stop="" waiting="" signal
    case $(basename "$1") in mpirun | mpiexec | orterun) stop=USR1 ;; esac
    pass_on() {
        heard=1
        [[ $1 != INT ]] || interrupts=$((interrupts + 1))
        if [[ -z $pid ]]; then
            waiting=$1
        elif [[ -n $stop && $interrupts -gt 1 ]]; then
            kill -TERM "$pid"
        else
            kill -"${stop:-$1}" "$pid"
        fi 2>/dev/null || true
    }
    for signal in INT TERM HUP USR1; do
        # shellcheck disable=SC2064
        trap "pass_on $signal" "$signal"
    done
    # Its own process group, so that only this script gets a terminal's Ctrl-C; with this script's input.
    set -m
    "$@" <&0 &
    pid=$!
    set +m
    [[ -z $waiting ]] || pass_on "$waiting"
    # A signal to this script ends `wait` early with another status. 127: the status was already collected.
    heard=1
    while [[ $heard == 1 ]]; do
        heard=0
        wait "$pid" && ended=0 || ended=$?
        [[ $ended == 127 && -n $status ]] || status=$ended
    done
    trap - INT TERM HUP USR1
    return "$status"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    [[ $# -gt 0 ]] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
    launch "$@"
fi
