#!/usr/bin/env bash
# Every run behind RESULTS.md, a part at a time, each set by steps: give the command again after a stop, and it
# goes on. On two cores about eight hours in all.
#
#     bash results/measure.sh PART [FOLDER]         PART: a name below; FOLDER: where to train, outside git
#
# What a run leaves here is its config.json, log.csv and evaluation.json, without the weights; with them
# `python compare.py results/tuned/*/` draws up the tables and pictures again and trains nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
part=$1
out=${2:-out/results}
compare="python compare.py --jobs=2"
six=learned,sinusoidal,shaw,rope,alibi,t5

keep() {        # keep FOLDER: copies what is to be kept of its runs and tables
    mkdir -p "results/$1"
    for run in "$out/$1"/*/; do
        [ -e "$run/evaluation.json" ] || continue
        mkdir -p "results/$1/$(basename "$run")"
        cp "$run"/{config.json,log.csv,evaluation.json} "results/$1/$(basename "$run")/"
    done
    for file in "$out/$1"/*.{md,csv,png}; do
        [ -e "$file" ] && cp "$file" "results/$1/"
    done
    find "results/$1" -name '*.csv' -o -name '*.md' -o -name config.json | xargs sed -i "s|$out/|out/results/|g"
}

train() {       # train FOLDER ARGUMENTS: trains a run in the folder, unless it is finished
    [ -e "$out/$1/loss.png" ] || python train.py "${@:2}" --overwrite=True --out_dir="$out/$1"
}

case $part in
tuning)                                     # section 0
    python tune.py --jobs=2 --out_dir="$out/tuning"
    cp "$out/tuning/tuning.csv" results/ ;;
tuned)                                      # section 1; seed by seed, so that a stop leaves whole columns
    for seeds in 1 2 3 4 5; do
        $compare --schemes=all --seeds=$seeds --out_dir="$out/tuned"
        keep tuned
    done ;;
published)                                  # section 1; the other four have no config of their own
    for seeds in 1 2 3; do
        $compare --schemes=sinusoidal,shaw,rope,t5 --seeds=$seeds --as_published --out_dir="$out/published"
        keep published
    done ;;
scaling)                                    # section 5; after `tuned`
    for seed in 1337 1338 1339; do
        start="--init_from=$out/tuned/rope-seed$seed --seed=$seed"
        for method in yarn linear ntk; do
            train scaling/$method-seed$seed config/$method.py $start
        done
        unscaled="config/yarn.py $start --rope_scaling=none"
        train scaling/unscaled-seed$seed $unscaled --rope_factor=1.0
        train scaling/unscaled4-seed$seed $unscaled --rope_factor=4.0
    done
    python compare.py "$out"/tuned/rope-seed133[789] "$out"/scaling/*-seed* --scalings=none,linear,ntk,dynamic,yarn \
        --out_dir="$out/scaling"
    keep scaling
    for length in 32 64 256; do
        $compare --schemes=rope --seeds=2 --block_size=$length --batch_size=$((1024 / length)) \
            --out_dir="$out/rope$length"
        python compare.py "$out"/rope$length/rope-seed* --scalings=none,linear,ntk,dynamic,yarn --out_dir="$out/rope$length"
        keep rope$length
    done ;;
steps)                                      # section 6: a quarter of the steps, three times as many
    $compare --schemes=$six --seeds=2 --max_iters=325 --out_dir="$out/steps325"
    keep steps325
    $compare --schemes=$six --seeds=2 --max_iters=3900 --out_dir="$out/steps3900"
    keep steps3900 ;;
blocks)                                     # section 6: as many tokens a step in shorter and longer windows
    $compare --schemes=$six --seeds=2 --block_size=64 --batch_size=16 --out_dir="$out/block64"
    keep block64
    $compare --schemes=$six --seeds=2 --block_size=256 --batch_size=4 --out_dir="$out/block256"
    keep block256 ;;
sizes)                                      # section 6: 0.2 and 3 million parameters
    $compare --schemes=$six --seeds=2 --n_embd=64 --out_dir="$out/small"
    keep small
    $compare --schemes=learned,rope,t5 --seeds=1 --n_embd=256 --block_size=256 --max_iters=1000 --out_dir="$out/large"
    keep large ;;
*)
    echo "measure.sh: there is no part '$part'; see its first lines" >&2
    exit 2 ;;
esac
