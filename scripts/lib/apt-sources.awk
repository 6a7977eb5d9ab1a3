# Reads apt source files, one-line (.list) and deb822 (.sources), and prints for each enabled binary source
# "SUITE<TAB>URI<TAB>SIGNED-BY" (SIGNED-BY empty if none, or if the key stands in the file itself).
function flush_stanza(   i, j, suites, uris) {
  if (field["types"] ~ /(^| )deb( |$)/ && field["enabled"] != "no")
    for (i = split(field["suites"], suites, " "); i > 0; i--)
      for (j = split(field["uris"], uris, " "); j > 0; j--)
        show(suites[i], uris[j], field["components"], field["signed-by"])
  delete field
  key = ""
}
function show(suite, uri, components, signed_by) {
  if ((" " components " ") ~ / main /) print suite "\t" uri "\t" (signed_by ~ /^\// ? signed_by : "")
}
FNR == 1 { flush_stanza() }
/^[[:space:]]*#/ { next }
FILENAME ~ /\.list$/ {
  if ($1 != "deb") next
  signed_by = ""
  if (match($0, /\[[^]]*\]/)) {
    options = substr($0, RSTART + 1, RLENGTH - 2)
    $0 = substr($0, 1, RSTART - 1) substr($0, RSTART + RLENGTH)
    if (match(options, /signed-by=[^ ]+/)) signed_by = substr(options, RSTART + 10, RLENGTH - 10)
  }
  uri = $2; suite = $3; $1 = $2 = $3 = ""
  show(suite, uri, $0, signed_by)
  next
}
/^[[:space:]]*$/ { flush_stanza(); next }
/^[[:space:]]/ { sub(/^[[:space:]]+/, ""); field[key] = field[key] " " $0; next }
{ key = tolower(substr($0, 1, index($0, ":") - 1)); value = substr($0, index($0, ":") + 1)
  sub(/^[[:space:]]+/, "", value); field[key] = value }
END { flush_stanza() }
