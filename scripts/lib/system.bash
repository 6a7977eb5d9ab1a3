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
  "find_python | python3-venv"
  "have mkfs.ext4 resize2fs debugfs | e2fsprogs"
  "have mmdebstrap | mmdebstrap"
  "have gpg | gpg"
  "keyring_present | debian-archive-keyring"
  "have busybox | busybox-static"
  "have setpriv unshare nsenter | util-linux"
  "have mount losetup | mount"
  "have ip | iproute2"
  "have zstd | zstd"
  "have xz | xz-utils"
  "have git | git"
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

go_is_recent() {
  local minor
  have go || return 1
  minor=$(GOTOOLCHAIN=local go env GOVERSION | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
  [ "${minor:-0}" -ge 22 ]
}

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
  find /etc/apt/sources.list /etc/apt/sources.list.d/ \( -name '*.list' -o -name '*.sources' \) -print0 2>/dev/null |
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

# On Debian 12, QEMU and Go come from backports; later releases carry them.
needs_backports() {
  [ "$(codename)" = bookworm ] && ! apt_sources | cut -f1 | grep -qx bookworm-backports
}

add_backports() {
  needs_backports || return 0
  local source
  source=$(backports_source bookworm) ||
    die 69 "no apt source of bookworm was found to derive bookworm-backports from" \
      "add bookworm-backports to /etc/apt/sources.list.d and run make setup again"
  may_be_root || die 77 "bookworm-backports is not among the apt sources, and sudo asks for a password" \
    "run as root: printf '%s\\n' $(printf '%q' "$source") >$backports_file && apt-get update"
  as_root tee "$backports_file" <<<"$source" >/dev/null
  update_lists
}

# The packages to install on Debian 12, split by the suite they have to come from.
from_backports() { grep -xE 'qemu-.*|golang-go' || true; }
from_release() { grep -vxE 'qemu-.*|golang-go' || true; }

install() { apt_get install --no-install-recommends "$@"; }

system_packages() {
  local missing
  missing=$(missing_packages)
  [ -n "$missing" ] || return 0
  have apt-get || die 69 "this system has no apt, and these are missing (Debian's names): ${missing//$'\n'/ }" \
    "install what provides them (QEMU with memory-backend-file rom=, Go >= 1.22, Python >= 3.11), then run make setup"
  may_be_root || die 77 "system packages are missing and sudo asks for a password" \
    "run as root: apt-get update && apt-get install --no-install-recommends ${missing//$'\n'/ }$(
      [ "$(codename)" != bookworm ] || echo "  (with -t bookworm-backports for: $(from_backports <<<"$missing" | xargs))")"
  if needs_backports; then add_backports; else update_lists; fi
  local backported='' released=$missing
  if [ "$(codename)" = bookworm ]; then
    backported=$(from_backports <<<"$missing")
    released=$(from_release <<<"$missing")
  fi
  # One name a line, so splitting into words is wanted.
  # shellcheck disable=SC2086
  [ -z "$released" ] || step "system packages: ${released//$'\n'/ }" install $released
  # shellcheck disable=SC2086
  [ -z "$backported" ] || step "from backports: ${backported//$'\n'/ }" install -t bookworm-backports $backported
  missing=$(missing_packages)
  [ -z "$missing" ] || die 69 "this release's packages are too old or incomplete: ${missing//$'\n'/ }" \
    "install QEMU with memory-backend-file rom= and Go >= 1.22, as in Debian 13 or bookworm-backports"
}
