# Sourced by scripts/setup: what the system must offer, and how apt provides it.
# Registry hosts are never named here: they come from the machine's own apt sources.

backports_file=/etc/apt/sources.list.d/aenv-backports.sources

# die EXIT_CODE WHAT FIX
die() {
  printf 'setup: %s\n  fix: %s\n' "$2" "$3" >&2
  exit "$1"
}

# "test command | package": a package is asked for only when its test fails.
needs=(
  "qemu_is_recent | qemu-system-x86"
  "have qemu-img qemu-storage-daemon | qemu-utils"
  "go_is_recent | golang-go"
  "have cc | gcc"
  "c_headers_present | libc6-dev"
  "find_python | python3-venv"
  "have mkfs.ext4 resize2fs debugfs | e2fsprogs"
  "have mmdebstrap | mmdebstrap"
  "have skopeo | skopeo"
  "have docker-registry | docker-registry"
  "have gpg | gpg"
  "have minisign | minisign"
  "have curl | curl"
  "have wget | wget"
  "keyring_present | debian-archive-keyring"
  "have busybox | busybox-static"
  "have setpriv unshare nsenter | util-linux"
  "have mount losetup | mount"
  "have ip | iproute2"
  "have nft | nftables"
  "runsc_present | runsc"
  "have zstd | zstd"
  "have xz | xz-utils"
  "have git | git"
  "have chromium | chromium"
  "have chromedriver | chromium-driver"
)

have() {
  local name
  for name in "$@"; do command -v "$name" >/dev/null || return 1; done
}

# memory-backend-file rom=, without which a snapshot's RAM file could be written through: QEMU 8.2 or later.
qemu_is_recent() {
  have qemu-system-x86_64 || return 1
  qemu-system-x86_64 -object memory-backend-file,help 2>/dev/null | grep -q '^ *rom='
}

c_headers_present() { [ -s /usr/include/stdio.h ]; }

go_is_recent() {
  local minor
  have go || return 1
  minor=$(go env GOVERSION | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
  [ "${minor:-0}" -ge 22 ]
}

# Without runsc there is no gVisor driver, and its tests fail. Ubuntu has no such package: there it is optional.
runsc_present() { have runsc || [ "$(distribution)" = ubuntu ]; }

keyring_present() { [ -s /usr/share/keyrings/debian-archive-keyring.gpg ]; }

# Prints the first Python that is new enough and can make virtual environments.
find_python() {
  local python
  for python in /usr/bin/python3 python3; do
    if "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$python"
      return
    fi
  done
  return 1
}

missing_packages() {
  local need
  for need in "${needs[@]}"; do
    ${need% | *} >/dev/null || printf '%s\n' "${need#* | }"
  done
}

distribution() { (. /etc/os-release && echo "${ID:-}"); }
codename() { (. /etc/os-release && echo "${VERSION_CODENAME:-}"); }

as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  elif [ -t 0 ]; then
    sudo "$@"
  else
    sudo -n "$@"
  fi
}

may_be_root() { [ "$(id -u)" = 0 ] || { have sudo && { [ -t 0 ] || sudo -n true 2>/dev/null; }; }; }

apt_get() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 \
    -o DPkg::Lock::Timeout=120 "$@"
}

update_lists() { step "package lists" apt_get update; }

# Prints "SUITE<TAB>URI<TAB>SIGNED-BY" for each apt source of this machine.
apt_sources() {
  # /etc/apt/sources.list need not exist: naming it to find would fail the whole pipe.
  find /etc/apt -maxdepth 2 \( -path '/etc/apt/sources.list' -o -path '/etc/apt/sources.list.d/*.list' \
    -o -path '/etc/apt/sources.list.d/*.sources' \) -print0 |
    sort -z | xargs -0r awk -f scripts/lib/apt-sources.awk
}

# Prints a deb822 source for SUITE-backports on the archive that serves SUITE. Others may use the release's name for
# their own archive; the distribution's is the one that serves SUITE-updates too, or whose path says so.
backports_source() {
  local suite=$1
  apt_sources | awk -F '\t' -v suite="$suite" '
    $1 == suite { score[$2] += /\/debian\/?\t/ ? 2 : 1; key[$2] = $3; if (!($2 in rank)) rank[$2] = ++count }
    $1 == suite "-updates" { score[$2] += 4 }
    END {
      for (uri in rank)
        if (best == "" || score[uri] > score[best] || (score[uri] == score[best] && rank[uri] < rank[best])) best = uri
      if (best == "") exit 1
      printf "Types: deb\nURIs: %s\nSuites: %s-backports\nComponents: main\n", best, suite
      if (key[best] != "") printf "Signed-By: %s\n", key[best]
    }'
}

# On Debian 12, QEMU, Go and runsc come from backports (the release's runsc is too old); later releases carry them.
needs_backports() {
  [ "$(codename)" = bookworm ] && ! apt_sources | cut -f1 | grep -x bookworm-backports >/dev/null
}

write_backports() {
  local source
  source=$(backports_source bookworm) ||
    die 69 "no apt source of bookworm was found to derive bookworm-backports from" \
      "add bookworm-backports to /etc/apt/sources.list.d and run make setup again"
  "$@" "$source"
}

store_backports() { as_root tee "$backports_file" <<<"$1" >/dev/null; }
print_backports() { printf "    printf '%%s\\\\n' %s >%s\n" "$(printf '%q' "$1")" "$backports_file"; }

# Stops with the commands for an administrator when root cannot be had; reads $released and $backported.
may_change_system() {
  local commands
  may_be_root && return
  commands=$(
    if needs_backports; then write_backports print_backports; fi
    echo "    apt-get update"
    if [ -n "$released" ]; then echo "    apt-get install --no-install-recommends ${released//$'\n'/ }"; fi
    if [ -n "$backported" ]; then
      echo "    apt-get install --no-install-recommends -t bookworm-backports ${backported//$'\n'/ }"
    fi
  )
  die 77 "the system must be changed, and this user may not: sudo is missing or asks for a password" \
    "run as root, then make setup again:"$'\n'"$commands"
}

add_backports() {
  needs_backports || return 0
  local released='' backported=''
  may_change_system
  write_backports store_backports
  update_lists
}

install() { apt_get install --no-install-recommends "$@"; }

system_packages() {
  local missing released backported=''
  missing=$(missing_packages)
  have runsc || [ "$(distribution)" != ubuntu ] ||
    say "note: no runsc, so no gVisor driver and 'make test' leaves its tests out; gvisor.dev says how to install it"
  [ -n "$missing" ] || return 0
  have apt-get || die 69 "this system has no apt, and these are missing (Debian's names): ${missing//$'\n'/ }" \
    "install what provides them (QEMU with memory-backend-file rom=, Go >= 1.22, cc, Python >= 3.11), then run make setup"
  released=$missing
  if [ "$(codename)" = bookworm ]; then
    backported=$(grep -xE 'qemu-.*|golang-go|runsc' <<<"$missing" || true)
    released=$(grep -vxE 'qemu-.*|golang-go|runsc' <<<"$missing" || true)
  fi
  may_change_system
  if needs_backports; then add_backports; else update_lists; fi
  # One name a line, so splitting into words is wanted.
  # shellcheck disable=SC2086
  [ -z "$released" ] || step "system packages: ${released//$'\n'/ }" install $released
  # shellcheck disable=SC2086
  [ -z "$backported" ] || step "from backports: ${backported//$'\n'/ }" install -t bookworm-backports $backported
  missing=$(missing_packages)
  [ -z "$missing" ] || die 69 "this release's packages are too old or incomplete: ${missing//$'\n'/ }" \
    "install QEMU with memory-backend-file rom= and Go >= 1.22, as in Debian 13 or bookworm-backports"
}
