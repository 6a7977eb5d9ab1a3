package users

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

func image(t *testing.T, files map[string]string) DB {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return DB{Root: root}
}

func TestLookup(t *testing.T) {
	db := image(t, map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\n#c:x:1:1::/:\nbroken\nann:x:1000:1000:Ann:/srv/ann:/bin/bash\n" +
			"odd:x:-1:0::/:\nnohome:x:7:7:::\n",
		"etc/group": "root:x:0:\nwheel:x:10:ann,root\nann:x:1000:ann\ndocker:x:99:bob,ann\n",
	})
	for name, want := range map[string]User{
		"ann":        {"ann", 1000, 1000, []uint32{1000, 10, 99}, "/srv/ann", "/bin/bash"},
		"1000":       {"ann", 1000, 1000, []uint32{1000, 10, 99}, "/srv/ann", "/bin/bash"},
		"1000:5":     {"ann", 1000, 5, []uint32{5}, "/srv/ann", "/bin/bash"},
		"4242":       {"4242", 4242, 0, []uint32{0}, "/", ""},
		"ann:docker": {"ann", 1000, 99, []uint32{99}, "/srv/ann", "/bin/bash"},
		"1000:wheel": {"ann", 1000, 10, []uint32{10}, "/srv/ann", "/bin/bash"},
		"4242:43":    {"4242", 4242, 43, []uint32{43}, "/", ""},
		"root":       {"root", 0, 0, []uint32{0, 10}, "/root", "/bin/sh"},
		"nohome":     {"nohome", 7, 7, []uint32{7}, "/", ""},
	} {
		got, err := db.Lookup(name)
		if err != nil || !reflect.DeepEqual(*got, want) {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, want)
		}
	}
	for _, name := range []string{"", "nobody", "-1", "4294967295", "1:2:3", "a/b", "odd", "1000:x", "#c"} {
		if u, err := db.Lookup(name); !errors.Is(err, ErrUnknown) {
			t.Errorf("%q: %+v, %v; want an unknown user", name, u, err)
		}
	}
}

func TestAnImageWithoutAccountsHasRoot(t *testing.T) {
	u, err := image(t, nil).Lookup("root")
	if err != nil || u.UID != 0 || u.Home != "/" {
		t.Errorf("%+v, %v", u, err)
	}
	u, err = image(t, map[string]string{"root/x": ""}).Lookup("0")
	if err != nil || u.Name != "root" || u.Home != "/root" {
		t.Errorf("%+v, %v", u, err)
	}
}

func TestResolve(t *testing.T) {
	u := &User{Name: "ann", Home: "/srv/ann"}
	for _, c := range []struct{ path, workdir, want string }{
		{"", "", "/srv/ann"}, {"", "/w", "/w"}, {"", "rel", "/srv/ann/rel"}, {"~", "/w", "/srv/ann"},
		{"~/x", "", "/srv/ann/x"}, {"a/../b", "/w", "/srv/ann/b"}, {"/a/../b", "", "/a/../b"}, {"./", "", "/srv/ann"},
	} {
		if got, err := Resolve(c.path, u, c.workdir); err != nil || got != c.want {
			t.Errorf("%q: %q, %v; want %q", c.path, got, err, c.want)
		}
	}
	for _, path := range []string{"~bob", "~bob/x", "a\x00b"} {
		if got, err := Resolve(path, u, ""); err == nil {
			t.Errorf("%q: %q, want an error", path, got)
		}
	}
}

func TestNamesFallBackToNumbers(t *testing.T) {
	n := image(t, map[string]string{"etc/passwd": "a:x:5:5::/:\nb:x:5:5::/:\n"}).Names()
	if n.User(5) != "a" || n.User(6) != "6" || n.Group(0) != "root" {
		t.Error(n.User(5), n.User(6), n.Group(0))
	}
}
