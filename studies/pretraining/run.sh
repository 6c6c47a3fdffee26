#!/usr/bin/env bash
# Run the whole study on one GPU: four queues at a time, the most important runs first.
#
#   studies/pretraining/run.sh tiny-imagenet/ pets64/ runs/
#
# It resumes if it is started again. Logs are in runs/logs/, results in runs/*/sweep.json and runs/*.probe.json.
set -u
tiny=$1 pets=$2 runs=$3
study=$(dirname "$0")
vitrail=${VITRAIL:-vitrail}
mkdir -p "$runs/logs"

small="--set model.image_size=64 --set model.patch_size=8 --set model.width=192 --set model.depth=9 --set model.heads=3
  --set model.class_token=none --set model.pool=mean --set model.final_norm=after_pool --set model.position=sincos_2d
  --set data.on_device=true --set evaluations=5"
padded="--set augmentation.crop=padded --set augmentation.flip=0.5"

logged() { # NAME COMMAND…
  local name=$1 began=$SECONDS
  shift
  $vitrail "$@" >>"$runs/logs/$name.log" 2>&1
  echo "$name: exit code $? after $((SECONDS - began)) s"
}

sweep() { # NAME DATA FILE JOBS OPTIONS…
  local name=$1 data=$2 file=$3 jobs=$4
  shift 4
  logged "$name" train "$data" --sweep "$file" --jobs "$jobs" --run "$runs/$name" "$@"
}

one_seed() { # FILE
  sed 's/^seeds = .*/seeds = [0]/' "$study/$1" >"$runs/one-seed-$1"
}

probe() { # NAME
  $vitrail probe "$runs/$1/best" "$tiny" --only knn,linear --precision bf16 --json >"$runs/$1.probe.json" 2>>"$runs/logs/$1-probe.log"
}

from_mae() {
  # shellcheck disable=SC2086
  logged mae pretrain "$tiny" --method mae --run "$runs/mae" $small $padded --set epochs=100 --set batch=1024 \
    --set optimizer.lr=0.0015
  sweep labels-mae "$tiny" "$study/labels.toml" 3 --from "$runs/mae/best"
  sweep pets-mae "$pets" "$study/pets.toml" 2 --from "$runs/mae/best"
  sweep pets-lora "$pets" "$study/lora.toml" 3 --from "$runs/mae/best"
  probe mae
}

distillation() {
  logged teacher train "$tiny" --recipe cifar10 --run "$runs/teacher" --set model.image_size=64 \
    --set model.patch_size=8 --set epochs=50 --set data.val=0.05
  sweep student "$tiny" "$study/distill.toml" 3
  sweep student-distilled "$tiny" "$study/distill.toml" 3 --teacher "$runs/teacher/best"
}

from_dino() {
  # shellcheck disable=SC2086
  logged dino pretrain "$tiny" --method dino --run "$runs/dino" $small --set epochs=14 --set batch=512
  sweep labels-dino "$tiny" "$runs/one-seed-labels.toml" 2 --from "$runs/dino/best"
  sweep pets-dino "$pets" "$runs/one-seed-pets.toml" 2 --from "$runs/dino/best"
  probe dino
}

from_masked_patches() {
  sweep pets-scratch "$pets" "$study/pets.toml" 2
  # shellcheck disable=SC2086
  logged masked-patches pretrain "$tiny" --method masked-patches --run "$runs/masked-patches" $small $padded \
    --set epochs=30 --set batch=512 --set optimizer.lr=0.001
  sweep labels-masked-patches "$tiny" "$runs/one-seed-labels.toml" 2 --from "$runs/masked-patches/best"
  probe masked-patches
  sweep labels-long "$tiny" "$study/long.toml" 1 --only labels-100
}

one_seed labels.toml
one_seed pets.toml
from_mae &
distillation &
from_dino &
from_masked_patches &
wait
