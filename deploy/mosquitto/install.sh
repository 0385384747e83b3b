#!/usr/bin/env bash
# Install Mosquitto for `fedcg broker run`: with apt as root, else extracted into .broker.
set -euo pipefail
cd "$(dirname "$0")/../.."

if command -v mosquitto >/dev/null || [ -x /usr/sbin/mosquitto ]; then
  echo "mosquitto is already installed"
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  echo "No apt-get here: install mosquitto with this system's package manager." >&2
  exit 2
fi
if [ "$(id -u)" = 0 ]; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends mosquitto
  exit 0
fi
target="$PWD/.broker"
state="$target/apt"
mkdir -p "$state/lists/partial" "$target/debs"
options=(-o "Dir::State::Lists=$state/lists" -o "Dir::Cache=$state" -o "Debug::NoLocking=1")
apt-get "${options[@]}" update -qq
(cd "$target/debs" && apt-get "${options[@]}" download -qq mosquitto libwrap0 libdlt2)
for package in "$target"/debs/*.deb; do dpkg -x "$package" "$target"; done
rm -rf "$target/debs" "$state"
echo "mosquitto extracted into .broker"
