#!/usr/bin/env bash
# Installs, upgrades or removes FedCG Edge on a box; keep it beside deploy/systemd. See deploy/README.md, "On each box".
set -euo pipefail
umask 022

usage() {
  cat <<'TEXT'
Usage: install.sh install|upgrade|uninstall [options]

install     the user fedcg, /opt/fedcg/venv, units, folders; where it is installed already, the same as upgrade
upgrade     puts the new version beside the old one, stops our units, copies every private store, switches by one rename, brings the
            stores to the new version's format, starts the units. A failure brings back the old version and the stores.
uninstall   removes program and units; private stores (/var/lib/fedcg) and configurations (/etc/fedcg) stay

--source WHAT           a wheel; the sources' folder; a folder of wheels, used without an index; or a requirement such as
                        fedcg-edge==1.2. Default: the sources that this script is part of. A constraints.txt beside it counts
                        with Python 3.11, for which it is made. pip's own settings (PIP_EXTRA_INDEX_URL, ...) hold.
--extra LIST            extras, with commas. Default: those that are installed, else edge; serve: a box that only predicts. infer-gpu adds
                        onnxruntime for an NVIDIA GPU, infer the one for the CPU; without either, infer is added where there is none yet
--python PATH           the Python of the installation, 3.10 or newer. Default: the one that is installed, else python3
--system-site-packages  also use the packages of that Python: on a Jetson, NVIDIA's torch and onnxruntime; no constraints.txt then
--unchecked NAME        don't open the store of this federation: it was damaged before
--purge                 uninstall: also remove stores, configurations and keys; asks first
--yes                   answer yes to --purge
--root DIR              everything below DIR, to try it out: no user is made, no unit is stopped or started

Exit codes: 0 done; 1 failed, the state before is in place; 2 bad options or unfit machine, nothing was done;
3 failed, and the state before could not be brought back: give the same command again.
TEXT
}

say() { echo "install.sh: $*"; }
fail() { local code=$1 && shift && echo "install.sh: $*" >&2 && exit "$code"; }

read_options() {
  action=${1:-} source="" extra="" python="" root="" unchecked="" site="" purge="" yes="" step="" slot="" wheel="" flags=() wanted="" old="" was="" ran=""
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) usage && exit 0 ;;
      --unchecked) [ -n "${2:-}" ] || fail 2 "$1 needs a name" && unchecked+=" $2 " && shift 2 ;;
      --source | --extra | --python | --root)
        [ -n "${2:-}" ] || fail 2 "$1 needs a value; see --help"
        printf -v "${1#--}" %s "$2" && shift 2
        ;;
      --system-site-packages) site=$1 && shift ;;
      --purge | --yes) printf -v "${1#--}" yes && shift ;;
      *) [ "$1" = "$action" ] || fail 2 "there is no option $1; see --help" && shift ;;
    esac
  done
  [[ $action =~ ^(install|upgrade|uninstall)$ ]] || { usage >&2 && exit 2; }
  [ -z "$root" ] || root=$(realpath -m -- "$root")
  [ "$root" != / ] || fail 2 "--root / is this machine: leave --root out"
  prefix=$root/opt/fedcg units=$root/etc/systemd/system configs=$root/etc/fedcg stores=$root/var/lib/fedcg
  undo=$prefix/undo here=$(dirname "$(realpath -- "$0")")
}

check_machine() {
  [ -n "$root" ] || [ "$(id -u)" = 0 ] || fail 2 "run this as root, or with --root DIR"
  [ -n "$root" ] || command -v systemctl >/dev/null || fail 2 "there is no systemctl here; --root DIR does without"
  [ ! -e "$units/fedcg-coordinator.service" ] ||
    fail 2 "a coordinator is installed here and uses $prefix/venv too: upgrade by hand (deploy/README.md)"
  [ -z "$root" ] || say "--root: no user is made, no unit is stopped or started, daemon-reload is left out"
  # What is refused is refused before anything is made. After an interruption the settings of the installation are not in place yet.
  [ "$action" = uninstall ] || [ -d "$undo" ] || (check_settings)
  mkdir -p "$prefix" "$units" "$configs" "$stores" || fail 2 "the folders of the installation can't be made"
  exec 9>"$prefix/.lock"
  flock -n 9 || fail 2 "another install.sh is at work on $prefix"
}

check_settings() {
  [ "$action" = install ] || [ -e "$prefix/venv" ] || fail 2 "nothing is installed in $prefix: install first"
  choose_python
  choose_source
}

choose_python() {
  local kept=$prefix/venv
  if [ -z "$python" ] && "$kept/bin/python" -c "" 2>/dev/null; then python=$kept/bin/python; fi
  python=${python:-python3}
  if grep -qs "include-system-site-packages = true" "$kept/pyvenv.cfg"; then site=--system-site-packages; fi
  [ "$("$python" -c "import sys, venv, ensurepip; print(sys.version_info >= (3, 10))")" = True ] ||
    fail 2 "$python is no Python from 3.10 on with venv: apt-get install python3-venv, or name another with --python"
}

choose_source() {
  local beside
  flags=()
  [ -n "$extra" ] || extra=$(cat "$prefix/venv/fedcg.extras" 2>/dev/null || echo edge)
  [[ $extra =~ ^[a-z0-9-]+(,[a-z0-9-]+)*$ ]] || fail 2 "--extra $extra: give names with commas, such as edge,privacy"
  [ -n "$source" ] || source=$(realpath "$here/../..")
  if [ -f "$source" ] || [ -f "$source/pyproject.toml" ]; then
    wanted=$(realpath -- "$source")
  elif [ -d "$source" ]; then
    flags=(--no-index --find-links "$(realpath -- "$source")") wanted=fedcg-edge
  elif [[ $source =~ ^fedcg-edge([=\<\>~!].*)?$ ]]; then
    wanted=$source
  else
    fail 2 "--source $source: no such file or folder, and no requirement such as fedcg-edge==1.2"
  fi
  if [ -d "$source" ]; then beside=$source; else beside=$(dirname -- "$source"); fi
  if [ -z "$site" ] && [ -f "$beside/constraints.txt" ] &&
    "$python" -c "import sys; sys.exit(sys.version_info[:2] != (3, 11))"; then
    flags+=(--constraint "$(realpath -- "$beside/constraints.txt")")
  fi
  if [ -f "$wanted/pyproject.toml" ]; then
    check_extras "$(sed -n '/^\[project.optional-dependencies]/,/^\[[^]]*]$/s/^\([a-z0-9-]*\) *=.*/\1/p' "$wanted/pyproject.toml")"
  elif [[ $wanted == *.whl ]]; then
    check_extras "$(extras_of_wheel "$wanted")"
  fi
}

check_extras() { # those that are asked for, against those that there are
  local known name
  known=" $(echo "$1" | sort | xargs) "
  for name in ${extra//,/ }; do
    [[ $known == *" $name "* ]] || fail 2 "--extra $name: there is no such extra; there are$known"
  done
}

unzip_metadata() { "$python" -c 'import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); print(*(z.read(n).decode() for n in z.namelist() if n.endswith(".dist-info/METADATA")))' "$1"; }
extras_of_wheel() { unzip_metadata "$1" | sed -n 's/^Provides-Extra: //p'; }
has_extra() { [[ ,$extra, == *,$1,* ]]; }
has_onnxruntime() { "$1/bin/python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('onnxruntime') is None)"; }
version_of() { "$1/bin/fedcg" --version | sed 's/.* //'; }

# The wheel of the new version, whose metadata has its extras; setuptools puts its folders beside it and not into the sources.
fetch_wheel() {
  local work=$prefix/$slot/wheel
  mkdir "$work"
  printf '[build]\nbuild_base = %s/build\n[egg_info]\negg_base = %s\n' "$work" "$work" >"$work/setuptools.cfg"
  DIST_EXTRA_CONFIG=$work/setuptools.cfg "$prefix/$slot/bin/pip" wheel --disable-pip-version-check --no-deps --wheel-dir "$work" "${flags[@]}" "$wanted"
  wheel=$(echo "$work"/*.whl)
  (check_extras "$(extras_of_wheel "$wheel")") || { rm -rf "${prefix:?}/$slot" && step="" && exit 2; }
}

# The new version, in the one of two folders that is not in use; nothing else is touched, and agents go on meanwhile.
build() {
  [ -f "$here/../systemd/fedcg-infer@.service" ] || fail 2 "deploy/systemd is missing beside $here: copy deploy/ as a whole"
  slot=venv-a && [ "$(readlink "$prefix/venv")" != venv-a ] || slot=venv-b
  step=build
  rm -rf "${prefix:?}/$slot"
  "$python" -m venv ${site:+"$site"} "$prefix/$slot"
  fetch_wheel
  if { has_extra edge || has_extra serve; } && ! has_extra infer && ! has_extra infer-gpu && ! has_onnxruntime "$prefix/$slot"; then
    say "no onnxruntime is there: the one for the CPU is installed; with an NVIDIA GPU give --extra $extra,infer-gpu"
    extra+=,infer
  fi
  "$prefix/$slot/bin/pip" install --disable-pip-version-check "${flags[@]}" "${wheel}[$extra]"
  rm -rf "${prefix:?}/$slot/wheel"
  echo "$extra" >"$prefix/$slot/fedcg.extras"
  new=$(version_of "$prefix/$slot")
  if has_extra edge; then
    "$prefix/$slot/bin/python" -c "import torch" && "$prefix/$slot/bin/fedcg" agent unit >"$prefix/$slot/fedcg-agent@.service"
  fi
  cp "$here/../systemd/fedcg-infer@.service" "$prefix/$slot/"
  sync -f "$prefix/$slot"
}

add_user() {
  if [ -n "$root" ] || id fedcg >/dev/null 2>&1; then return; fi
  local groups
  groups=$(getent group video render | cut -d: -f1 | paste -sd,) || true
  useradd --system --user-group --home-dir "$stores" --shell /usr/sbin/nologin ${groups:+--groups "$groups"} fedcg
}

stop_units() { # and note which ran
  if [ -n "$root" ]; then return; fi
  systemctl list-units --plain --no-legend --state=active,activating 'fedcg-agent@*' 'fedcg-infer@*' |
    while read -r unit _ state _; do echo "$unit $state"; done >"$1"
  cut -d' ' -f1 "$1" | xargs -r systemctl stop
}

start_units() { # those that ran; one that did not start before either decides nothing
  if [ -n "$root" ]; then return; fi
  systemctl daemon-reload
  while read -r unit state; do
    if [ "$state" = active ]; then systemctl start "$unit"; else systemctl start --no-block "$unit"; fi
  done <"$undo/running"
}

names_of_stores() { find "$stores" -mindepth 2 -maxdepth 2 -name format.json -printf '%h\n' | sed 's|.*/||' | grep -v '^\.' | sort || true; }

check_nobody_uses_stores() {
  local lock
  for lock in "$stores"/*/lock "$stores"/*/trainer.lock; do
    [ ! -e "$lock" ] || flock -n "$lock" true || fail 1 "$lock is held: end the agent that was started by hand"
  done
}

# Everything that takes the old state back, complete before anything is changed.
prepare_undo() {
  local unit name
  mkdir "$undo.new"
  for unit in "$units"/fedcg-{agent,infer}@.service; do [ ! -e "$unit" ] || cp -a "$unit" "$undo.new/"; done
  old=$(readlink "$prefix/venv" || true)
  [ -z "$old" ] || ln -s "$old" "$undo.new/venv"
  : >"$undo.new/running"
  mv -T "$undo.new" "$undo"
  step=stop
  stop_units "$undo/running"
  check_nobody_uses_stores
  for name in $(names_of_stores); do # not by hard links: logs and ledgers are appended to in place
    cp -a --reflink=auto "$stores/$name" "$stores/.$name.copying"
    sync -f "$stores/.$name.copying"
    mv -T "$stores/.$name.copying" "$stores/.$name.before-upgrade"
  done
}

switch_to_new() {
  step=switch
  ln -sfn "$slot" "$prefix/venv.new"
  mv -T "$prefix/venv.new" "$prefix/venv"
  sync -f "$prefix"
}

migrate_stores() {
  local name as_agent=(runuser -u fedcg --)
  [ -z "$root" ] || as_agent=()
  for name in $(names_of_stores); do
    if [[ $unchecked == *" $name "* ]] || [ ! -e "$configs/$name/agent.toml" ] || ! has_extra edge; then
      say "$stores/$name was not opened (--unchecked, no agent.toml, or no extra edge)"
      continue
    fi
    "${as_agent[@]}" env "FEDCG_AGENT_STORE=$stores/$name" "$prefix/venv/bin/fedcg" agent store migrate \
      --config "$configs/$name/agent.toml" || fail 1 "version $new can't use the private store $stores/$name, see above"
  done
}

install_units() {
  local unit
  for unit in "$prefix/$slot"/fedcg-*@.service; do install -m 0644 "$unit" "$units/"; done
}

roll_back() {
  local copy name unit
  rm -f "$prefix/venv" # no program meanwhile: a power cut must not start one on a store that is half there
  sync -f "$prefix"
  for copy in "$stores"/.*.before-upgrade; do
    [ -e "$copy" ] || continue
    name=${copy##*/.} && name=${name%.before-upgrade}
    # A unit that ran may have trained. What it did is kept where the old version can read it.
    if [ -z "$ran" ] || ! cmp -s "$copy/format.json" "$stores/$name/format.json"; then
      [ -z "$ran" ] || rm -f "$copy/sum_gate.json" # an older copy does not know the last sums: its owner resumes them
      rm -rf "${stores:?}/$name"
      mv -T "$copy" "$stores/$name"
    fi
    rm -rf "$copy"
  done
  for unit in fedcg-{agent,infer}@.service; do
    rm -f "$units/$unit"
    [ ! -e "$undo/$unit" ] || cp -a "$undo/$unit" "$units/"
  done
  sync -f "$stores"
  [ ! -L "$undo/venv" ] || mv -T "$undo/venv" "$prefix/venv"
  start_units
  rm -rf "$stores"/.*.copying "$undo"
}

# After a power cut or a kill. With a program in place either version goes on with the stores as they are: a copy would be out of date.
finish_interrupted() {
  rm -rf "$undo.new" "$stores"/.*.copying
  if [ ! -d "$undo" ]; then return; fi
  say "an earlier run was interrupted; its traces are cleared first"
  if [ -L "$prefix/venv" ]; then
    start_units || say "some units did not start, see above"
    rm -rf "$stores"/.*.before-upgrade "$undo"
  else
    roll_back
  fi
}

on_exit() {
  local code=$? undone=0
  trap '' INT TERM HUP
  if [ "$code" = 0 ] || [ -z "$step" ]; then exit "$code"; fi
  set +e # a condition around the subshell would switch off its set -e
  if [ "$step" != build ]; then (set -e; roll_back); undone=$?; fi
  [ "$undone" = 0 ] || fail 3 "failed, and the state before could not be brought back: give the same command again"
  rm -rf "${prefix:?}/$slot"
  fail 1 "failed; ${was:+version $was, }units and private stores are as before"
}

put_in_place() {
  check_settings
  build
  add_user
  if [ -d "$prefix/venv" ] && [ ! -L "$prefix/venv" ]; then # made by hand
    mv -T "$prefix/venv" "$prefix/venv-by-hand" && ln -s venv-by-hand "$prefix/venv"
  fi
  if [ -e "$prefix/venv" ]; then was=$(version_of "$prefix/venv" || echo unknown); fi
  prepare_undo
  switch_to_new
  migrate_stores
  install_units
  ran=yes
  start_units
  step=""
  rm -rf "$stores"/.*.before-upgrade "$undo"
  [ -z "$old" ] || [ "$old" = "$slot" ] || rm -rf "${prefix:?}/$old"
  say "version $new is in place${was:+, before it was $was}"
  [ -n "$was" ] || say "next: $(next_step) (deploy/README.md)"
}

next_step() {
  if has_extra edge; then
    echo "fedcg enrol --out /etc/fedcg/NAME, then systemctl enable --now fedcg-agent@NAME"
  else
    echo "copy a model's versions to /var/lib/fedcg/NAME/models, fedcg model verify /var/lib/fedcg/NAME, then systemctl enable --now fedcg-infer@NAME"
  fi
}

uninstall() {
  if [ -n "$purge" ]; then
    echo "This removes for good, with keys, certificates and trained state:"
    find "$stores" "$configs" -mindepth 1 -maxdepth 1 -printf '  %p\n'
    [ -n "$yes" ] || [ -t 0 ] || fail 2 "--purge needs a terminal to ask on, or --yes"
    [ -n "$yes" ] || { read -r -p "Type yes to go on: " answer && [ "$answer" = yes ]; } || fail 2 "nothing was removed"
  fi
  stop_units "$prefix/running"
  check_nobody_uses_stores
  rm -f "$units"/fedcg-{agent,infer}@.service "$units"/*.wants/fedcg-{agent,infer}@*.service
  [ -n "$root" ] || systemctl daemon-reload
  rm -rf "${prefix:?}"/venv* "$prefix/running" "$prefix/.lock"
  rmdir --ignore-fail-on-non-empty "$prefix"
  if [ -z "$purge" ]; then
    say "removed; private stores and configurations stay in $stores and $configs"
    return
  fi
  rm -rf "${stores:?}" "${configs:?}"
  if [ -z "$root" ] && id fedcg >/dev/null 2>&1; then userdel fedcg; fi
  say "removed, with stores and configurations; the operator revokes the device: fedcg device revoke"
}

read_options "$@"
trap on_exit EXIT
trap 'exit 130' INT TERM HUP
check_machine
finish_interrupted
if [ "$action" = uninstall ]; then uninstall; else put_in_place; fi
