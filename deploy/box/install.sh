#!/usr/bin/env bash
# Installs, upgrades or removes FedCG Edge on a device; needs deploy/systemd next to it. See deploy/README.md, "On each device".
set -euo pipefail
umask 022

usage() {
  cat <<'TEXT'
Usage: install.sh install|upgrade|uninstall [options]

install     creates the user fedcg, /opt/fedcg/venv, units and folders; if already installed, the same as upgrade
upgrade     installs the new version next to the old one, stops our units, copies every private store, switches by one rename,
            migrates the stores to the new version's format, starts the units. A failure restores the old version and the stores.
uninstall   removes program and units; keeps private stores (/var/lib/fedcg) and configurations (/etc/fedcg)

--source WHAT           a wheel; the sources' folder; a folder of wheels, used without an index; or a requirement such as
                        fedcg-edge==1.2. Default: the sources that contain this script. A constraints.txt next to it applies
                        with Python 3.11, for which it is written. pip's own settings (PIP_EXTRA_INDEX_URL, ...) apply.
--extra LIST            extras, comma-separated. Default: those of the installed version, else edge; serve: a device that only predicts.
                        infer-gpu adds onnxruntime for an NVIDIA GPU, infer the one for the CPU; without either, infer is added if
                        onnxruntime is missing
--python PATH           the Python of the installation, 3.10 or newer. Default: that of the installed version, else python3
--system-site-packages  also use the packages of that Python: on a Jetson, NVIDIA's torch and onnxruntime; constraints.txt is ignored
--unchecked NAME        don't open the store of this federation, because it is already damaged
--purge                 uninstall: also remove stores, configurations and keys; asks first
--yes                   answer yes to --purge
--root DIR              a trial with everything below DIR: creates no user, stops and starts no unit

Exit codes: 0 done; 1 failed, the previous state is restored; 2 bad options or unsuitable machine, nothing was changed;
3 failed, and the previous state could not be restored: run the same command again.
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
      *) [ "$1" = "$action" ] || fail 2 "unknown option $1; see --help" && shift ;;
    esac
  done
  [[ $action =~ ^(install|upgrade|uninstall)$ ]] || { usage >&2 && exit 2; }
  [ -z "$root" ] || root=$(realpath -m -- "$root")
  [ "$root" != / ] || fail 2 "--root / is this machine: omit --root"
  prefix=$root/opt/fedcg units=$root/etc/systemd/system configs=$root/etc/fedcg stores=$root/var/lib/fedcg
  undo=$prefix/undo here=$(dirname "$(realpath -- "$0")")
}

check_machine() {
  [ -n "$root" ] || [ "$(id -u)" = 0 ] || fail 2 "run this as root, or with --root DIR"
  [ -n "$root" ] || command -v systemctl >/dev/null || fail 2 "systemctl not found; --root DIR does not need it"
  [ ! -e "$units/fedcg-coordinator.service" ] ||
    fail 2 "a coordinator is installed here and also uses $prefix/venv: upgrade by hand (deploy/README.md)"
  [ -z "$root" ] || say "--root: creates no user, stops and starts no unit, skips daemon-reload"
  # Refuse before anything is created. After an interruption the settings of the installation are not restored yet.
  [ "$action" = uninstall ] || [ -d "$undo" ] || (check_settings)
  mkdir -p "$prefix" "$units" "$configs" "$stores" || fail 2 "the folders of the installation can't be created"
  exec 9>"$prefix/.lock"
  flock -n 9 || fail 2 "another install.sh is running on $prefix"
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
    fail 2 "$python is not Python 3.10 or newer with venv: apt-get install python3-venv, or choose another with --python"
}

choose_source() {
  local beside
  flags=()
  [ -n "$extra" ] || extra=$(cat "$prefix/venv/fedcg.extras" 2>/dev/null || echo edge)
  [[ $extra =~ ^[a-z0-9-]+(,[a-z0-9-]+)*$ ]] || fail 2 "--extra $extra: separate names with commas, such as edge,privacy"
  [ -n "$source" ] || source=$(realpath "$here/../..")
  if [ -f "$source" ] || [ -f "$source/pyproject.toml" ]; then
    wanted=$(realpath -- "$source")
  elif [ -d "$source" ]; then
    flags=(--no-index --find-links "$(realpath -- "$source")") wanted=fedcg-edge
  elif [[ $source =~ ^fedcg-edge([=\<\>~!].*)?$ ]]; then
    wanted=$source
  else
    fail 2 "--source $source: not a file, a folder, or a requirement such as fedcg-edge==1.2"
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

check_extras() { # the requested extras, against the known ones
  local known name
  known=" $(echo "$1" | sort | xargs) "
  for name in ${extra//,/ }; do
    [[ $known == *" $name "* ]] || fail 2 "--extra $name: unknown extra; choose from$known"
  done
}

unzip_metadata() { "$python" -c 'import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); print(*(z.read(n).decode() for n in z.namelist() if n.endswith(".dist-info/METADATA")))' "$1"; }
extras_of_wheel() { unzip_metadata "$1" | sed -n 's/^Provides-Extra: //p'; }
has_extra() { [[ ,$extra, == *,$1,* ]]; }
has_onnxruntime() { "$1/bin/python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('onnxruntime') is None)"; }
version_of() { "$1/bin/fedcg" --version | sed 's/.* //'; }

# The wheel of the new version, whose metadata lists its extras; setuptools puts its folders next to it, not into the sources.
fetch_wheel() {
  local work=$prefix/$slot/wheel
  mkdir "$work"
  printf '[build]\nbuild_base = %s/build\n[egg_info]\negg_base = %s\n' "$work" "$work" >"$work/setuptools.cfg"
  DIST_EXTRA_CONFIG=$work/setuptools.cfg "$prefix/$slot/bin/pip" wheel --disable-pip-version-check --no-deps --wheel-dir "$work" "${flags[@]}" "$wanted"
  wheel=$(echo "$work"/*.whl)
  (check_extras "$(extras_of_wheel "$wheel")") || { rm -rf "${prefix:?}/$slot" && step="" && exit 2; }
}

# Builds the new version in the unused one of two folders; nothing else changes, and agents keep running.
build() {
  [ -f "$here/../systemd/fedcg-infer@.service" ] || fail 2 "deploy/systemd is missing next to $here: copy deploy/ as a whole"
  slot=venv-a && [ "$(readlink "$prefix/venv")" != venv-a ] || slot=venv-b
  step=build
  rm -rf "${prefix:?}/$slot"
  "$python" -m venv ${site:+"$site"} "$prefix/$slot"
  fetch_wheel
  if { has_extra edge || has_extra serve; } && ! has_extra infer && ! has_extra infer-gpu && ! has_onnxruntime "$prefix/$slot"; then
    say "onnxruntime is missing: installing the one for the CPU; with an NVIDIA GPU use --extra $extra,infer-gpu"
    extra+=,infer
  fi
  "$prefix/$slot/bin/pip" install --disable-pip-version-check "${flags[@]}" "${wheel}[$extra]"
  rm -rf "${prefix:?}/$slot/wheel"
  echo "$extra" >"$prefix/$slot/fedcg.extras"
  new=$(version_of "$prefix/$slot")
  if has_extra edge; then
    "$prefix/$slot/bin/python" -c "import torch"
    "$prefix/$slot/bin/fedcg" agent --help >/dev/null # imports all that the agent's commands need
    cp "$here/../systemd/fedcg-agent@.service" "$prefix/$slot/"
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

stop_units() { # and record which ran
  if [ -n "$root" ]; then return; fi
  systemctl list-units --plain --no-legend --state=active,activating 'fedcg-agent@*' 'fedcg-infer@*' |
    while read -r unit _ state _; do echo "$unit $state"; done >"$1"
  cut -d' ' -f1 "$1" | xargs -r systemctl stop
}

start_units() { # those that ran; a unit that was not active before is not waited for
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
    [ ! -e "$lock" ] || flock -n "$lock" true || fail 1 "$lock is held: stop the agent that was started by hand"
  done
}

# Saves everything needed to restore the old state, before anything is changed.
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
  for name in $(names_of_stores); do # not by hard links: logs and ledgers are appended in place
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
  rm -f "$prefix/venv" # no program meanwhile: after a power cut none may start on an incomplete store
  sync -f "$prefix"
  for copy in "$stores"/.*.before-upgrade; do
    [ -e "$copy" ] || continue
    name=${copy##*/.} && name=${name%.before-upgrade}
    # A unit that ran may have trained. Its work is kept if the old version can read it.
    if [ -z "$ran" ] || ! cmp -s "$copy/format.json" "$stores/$name/format.json"; then
      [ -z "$ran" ] || rm -f "$copy/sum_gate.json" # an older copy lacks the last sums: its owner resumes them
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

# After a power cut or a kill. With a program in place, either version continues with the current stores: a copy would be outdated.
finish_interrupted() {
  rm -rf "$undo.new" "$stores"/.*.copying
  if [ ! -d "$undo" ]; then return; fi
  say "an earlier run was interrupted; cleaning up first"
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
  set +e # a condition around the subshell would disable its set -e
  if [ "$step" != build ]; then (set -e; roll_back); undone=$?; fi
  [ "$undone" = 0 ] || fail 3 "failed, and the previous state could not be restored: run the same command again"
  rm -rf "${prefix:?}/$slot"
  fail 1 "failed; ${was:+version $was, }units and private stores are unchanged"
}

put_in_place() {
  check_settings
  build
  add_user
  if [ -d "$prefix/venv" ] && [ ! -L "$prefix/venv" ]; then # created by hand
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
  say "version $new is installed${was:+, before it was $was}"
  [ -n "$was" ] || say "next: $(next_step) (deploy/README.md)"
}

next_step() {
  if has_extra edge; then
    echo "fedcg enrol --out /etc/fedcg/NAME, then systemctl enable --now fedcg-agent@NAME"
  else
    echo "copy a model's versions to /var/lib/fedcg/NAME/models, fedcg model list /var/lib/fedcg/NAME/models, then systemctl enable --now fedcg-infer@NAME"
  fi
}

uninstall() {
  if [ -n "$purge" ]; then
    echo "This permanently removes, with keys, certificates and trained state:"
    find "$stores" "$configs" -mindepth 1 -maxdepth 1 -printf '  %p\n'
    [ -n "$yes" ] || [ -t 0 ] || fail 2 "--purge needs a terminal for its question, or --yes"
    [ -n "$yes" ] || { read -r -p "Type yes to continue:  " answer && [ "$answer" = yes ]; } || fail 2 "nothing was removed"
  fi
  stop_units "$prefix/running"
  check_nobody_uses_stores
  rm -f "$units"/fedcg-{agent,infer}@.service "$units"/*.wants/fedcg-{agent,infer}@*.service
  [ -n "$root" ] || systemctl daemon-reload
  rm -rf "${prefix:?}"/venv* "$prefix/running" "$prefix/.lock"
  rmdir --ignore-fail-on-non-empty "$prefix"
  if [ -z "$purge" ]; then
    say "removed; private stores and configurations remain in $stores and $configs"
    return
  fi
  rm -rf "${stores:?}" "${configs:?}"
  if [ -z "$root" ] && id fedcg >/dev/null 2>&1; then userdel fedcg; fi
  say "removed, with stores and configurations; now the operator must revoke the device: fedcg device revoke"
}

read_options "$@"
trap on_exit EXIT
trap 'exit 130' INT TERM HUP
check_machine
finish_interrupted
if [ "$action" = uninstall ]; then uninstall; else put_in_place; fi
