package archive

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"aenv/envd/internal/users"
)

var stamp = time.Unix(1_500_000_000, 0)

func pack(t *testing.T, entries ...tar.Header) *bytes.Buffer {
	t.Helper()
	buf := &bytes.Buffer{}
	w := tar.NewWriter(buf)
	for _, h := range entries {
		body := ""
		if h.Typeflag == tar.TypeReg {
			body = "content of " + h.Name
			h.Size = int64(len(body))
		}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		h.ModTime = stamp
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(body)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf
}

func file(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }
func dir(name string) tar.Header  { return tar.Header{Typeflag: tar.TypeDir, Name: name} }
func link(kind byte, name, target string) tar.Header {
	return tar.Header{Typeflag: kind, Name: name, Linkname: target}
}

func me() *users.User { return &users.User{UID: uint32(os.Getuid()), GID: uint32(os.Getgid())} }

// sandbox is DIR with a secret beside it, which nothing may change.
func sandbox(t *testing.T) (target, secret string) {
	base := t.TempDir()
	target, secret = filepath.Join(base, "dir"), filepath.Join(base, "secret")
	if err := errors.Join(os.Mkdir(target, 0o755), os.WriteFile(secret, []byte("intact"), 0o600)); err != nil {
		t.Fatal(err)
	}
	return target, secret
}

func TestAttacksAreRefused(t *testing.T) {
	for name, entries := range map[string][]tar.Header{
		"dot-dot":                   {file("../secret")},
		"dot-dot inside":            {dir("a"), file("a/../../secret")},
		"absolute dot-dot":          {file("/../secret")},
		"link as parent":            {link(tar.TypeSymlink, "l", ".."), file("l/secret")},
		"deep link as parent":       {dir("a"), link(tar.TypeSymlink, "a/l", "/"), file("a/l/x/y/z")},
		"link replaced by dir":      {link(tar.TypeSymlink, "l", ".."), dir("l")},
		"link to itself as parent":  {link(tar.TypeSymlink, "l", "l"), file("l/x")},
		"hard link out by dot-dot":  {link(tar.TypeLink, "h", "../secret")},
		"hard link through a link":  {link(tar.TypeSymlink, "l", ".."), link(tar.TypeLink, "h", "l/secret")},
		"hard link to nothing":      {link(tar.TypeLink, "h", "missing")},
		"hard link to a directory":  {dir("d"), link(tar.TypeLink, "h", "d")},
		"file as parent":            {file("f"), file("f/x")},
		"file over a directory":     {dir("d"), file("d")},
		"character device":          {{Typeflag: tar.TypeChar, Name: "dev", Devmajor: 1, Devminor: 3}},
		"block device":              {{Typeflag: tar.TypeBlock, Name: "dev", Devmajor: 8}},
		"fifo":                      {{Typeflag: tar.TypeFifo, Name: "fifo"}},
		"parent swapped for a link": {file("a/x"), link(tar.TypeSymlink, "b", "../"), link(tar.TypeSymlink, "b/c", "x")},
	} {
		target, secret := sandbox(t)
		_, err := Extract(pack(t, entries...), target, me(), false)
		var bad *BadEntry
		last := entries[len(entries)-1].Name
		if !errors.As(err, &bad) || !strings.Contains(err.Error(), last) {
			t.Errorf("%s: error %v does not refuse %q", name, err, last)
		}
		data, rerr := os.ReadFile(secret)
		around, _ := os.ReadDir(filepath.Dir(target))
		if rerr != nil || string(data) != "intact" || len(around) != 2 {
			t.Errorf("%s: it changed what is outside: %q %v %v", name, data, rerr, around)
		}
	}
}

func TestALinkIsReplacedNotFollowed(t *testing.T) {
	target, secret := sandbox(t)
	_, err := Extract(pack(t, link(tar.TypeSymlink, "l", secret), file("l")), target, me(), false)
	if err != nil {
		t.Fatal(err)
	}
	if data, _ := os.ReadFile(secret); string(data) != "intact" {
		t.Errorf("the file behind the link is now %q", data)
	}
	if data, _ := os.ReadFile(filepath.Join(target, "l")); string(data) != "content of l" {
		t.Errorf("the link was not replaced: %q", data)
	}
}

func TestAbsoluteNamesBecomeRelative(t *testing.T) {
	target, _ := sandbox(t)
	if _, err := Extract(pack(t, file("/etc/x")), target, me(), false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(target, "etc/x")); err != nil {
		t.Error(err)
	}
}

func TestRoundTrip(t *testing.T) {
	target, _ := sandbox(t)
	sealed := dir("d")
	sealed.Mode = 0o555
	suid := file("d/suid")
	suid.Mode = 0o4755
	in := pack(t, dir("./"), sealed, suid, link(tar.TypeLink, "hard", "d/suid"), link(tar.TypeSymlink, "soft", "nowhere"))
	got, err := Extract(in, target, me(), true)
	if err != nil || got.Entries != 5 || got.Bytes != int64(len("content of d/suid")) {
		t.Fatalf("%+v %v", got, err)
	}
	t.Cleanup(func() { _ = os.Chmod(filepath.Join(target, "d"), 0o755) })
	st, err := os.Stat(filepath.Join(target, "d/suid"))
	if err != nil || st.Mode() != 0o755|os.ModeSetuid || !st.ModTime().Equal(stamp) {
		t.Errorf("suid: %v %v", st, err)
	}
	st, err = os.Stat(filepath.Join(target, "d"))
	if err != nil || st.Mode().Perm() != 0o555 || !st.ModTime().Equal(stamp) {
		t.Errorf("dir: %v %v", st, err)
	}
	if err := syscall.Mknod(filepath.Join(target, "sock"), syscall.S_IFSOCK|0o600, 0); err != nil {
		t.Fatal(err)
	}
	var one, two bytes.Buffer
	if err := errors.Join(Create(&one, target), Create(&two, target)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(one.Bytes(), two.Bytes()) {
		t.Error("two streams of one tree differ")
	}
	var names []string
	r := tar.NewReader(&one)
	for h, err := r.Next(); err == nil; h, err = r.Next() {
		names = append(names, h.Name+string(h.Typeflag)+h.Linkname)
	}
	want := "dir/5 dir/d/5 dir/d/suid0 dir/hard1dir/d/suid dir/soft2nowhere"
	if strings.Join(names, " ") != want {
		t.Errorf("%v, want %v", names, want)
	}
}
