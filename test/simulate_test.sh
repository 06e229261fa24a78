#!/usr/bin/env bash
# Simulated months of supervised jobs (simulate.cpp); then the same with faults planted in the decisions, each of which must break
# a rule. ALL=1: a hundred times as many jobs.
source=$(realpath "$(dirname "$0")/..")
. "$(dirname "$0")/lib.sh"
CXX=${CXX:-g++}

build() { "$CXX" -std=c++17 -O1 -Wall -Wextra -Werror -Wno-unused-parameter test/simulate.cpp -o simulate; } # of this folder's copy of the sources
mkdir -p test llmc && cp "$source/test/simulate.cpp" test && cp -r "$source/llmc/base" "$source/llmc/run" llmc
mkdir llmc/checkpoint && cp "$source/llmc/checkpoint/part_choice.h" llmc/checkpoint
expect "the simulation builds" build
passes "simulated jobs" ./simulate "${ALL:+300000}${ALL:-3000}" "$(date +%Y%m%d)"

# planted NAME FROM TO: with this change of $header a rule is broken.
planted() {
    sed "s#$2#$3#" "$source/$header" >"$header"
    if cmp -s "$source/$header" "$header"; then echo "FAILED: $1: cannot be planted"; return; fi
    expect "$1: builds" build
    expect "$1: is found" refused timeout 60 ./simulate 3000 1
    cp "$source/$header" "$header"
}
header=llmc/checkpoint/part_choice.h
planted "a node keeps its own copies" '(node_of(r) + 1) % size()' 'node_of(r)'
planted "copies of the last node are kept by none" '(node_of(r) + size() - 1) % size()' 'std::max<size_t>(node_of(r), 1) - 1'
planted "an incomplete save is resumed" 'parts.size() == save.parts' 'parts.size() + 1 >= save.parts'
planted "snapshots come after checkpoints" 'return r.step < s.step' 'return false'
planted "parts with copies are not read" 'single != (ranks.size() == 1)' '!single || ranks.size() > 1'
header=llmc/run/supervisor.h
planted "a program's fault is never seen" '>= rules_.same_step)' '>= 1000)'
planted "a finished run is restarted" 'cause == Cause::done)' 'cause == Cause::done \&\& restarts_ > 1000000)'
planted "waits do not grow" 'std::ldexp(rules_.first_wait, [^)]*))' 'rules_.first_wait'
planted "waits have no limit" 'std::max(0, idle_ - 1)), rules_.longest_wait)' 'std::max(0, idle_ - 1)), 1e9)'
planted "restarts have no limit" 'idle_ > rules_.restarts' 'idle_ > 1000000'
planted "a spare is used twice" 'spares_.erase(spare);' ';'
planted "too many ranks are left" 'ranks_ = ranks;' ';'
planted "the layout is not asked" '!fits_(ranks)' 'false'
planted "wrong results are tolerated once" '(wrong ||' '(false ||'
planted "old failures count" 'time - t > rules_.strikes_expire' 'false'
planted "bad nodes stay" '>= rules_.strikes)' '>= 1000)'
planted "the launcher's own node is accused" '"Remote daemon:"' '"HNP daemon "'
planted "the waiting rank is accused" '|| has_text(line, "waiting for ")' '|| !has_text(line, "waiting for ")'
