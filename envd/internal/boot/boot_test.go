package boot

import (
	"os"
	"path/filepath"
	"testing"
	"unsafe"
)

func TestOptions(t *testing.T) {
	want := Options{Root: "/dev/vda", IP: "10.0.2.15/24", Gateway: "10.0.2.2", DNS: "10.0.2.3"}
	if got := ParseOptions("quiet console=ttyS0 aenv.unknown=1 aenv.root"); got != want {
		t.Errorf("%+v", got)
	}
	want = Options{Root: "/dev/vdb", IP: "none", Gateway: "10.1.0.1", DNS: "1.1.1.1,8.8.8.8", Hostname: "box"}
	got := ParseOptions("aenv.root=/dev/vdb aenv.ip=none aenv.gw=10.1.0.1 aenv.dns=1.1.1.1,8.8.8.8 aenv.hostname=box\n")
	if got != want {
		t.Errorf("%+v", got)
	}
}

func TestAMountPointIsNeverALink(t *testing.T) {
	base := t.TempDir()
	elsewhere, point := filepath.Join(base, "elsewhere"), filepath.Join(base, "run")
	if err := os.Mkdir(elsewhere, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, prepare := range []func() error{
		func() error { return nil },
		func() error { return os.Symlink(elsewhere, point) },
		func() error { return os.WriteFile(point, nil, 0o644) },
	} {
		_ = os.Remove(point)
		if err := prepare(); err != nil {
			t.Fatal(err)
		}
		for i := 0; i < 2; i++ {
			if err := mountPoint(point); err != nil {
				t.Fatal(err)
			}
			if st, err := os.Lstat(point); err != nil || !st.IsDir() {
				t.Errorf("%v %v", st, err)
			}
		}
	}
}

func TestKernelStructSizes(t *testing.T) {
	if s := unsafe.Sizeof(rtentry{}); s != 120 {
		t.Errorf("struct rtentry has %d bytes", s)
	}
	if s := unsafe.Sizeof(ifreq{}); s != 40 {
		t.Errorf("struct ifreq has %d bytes", s)
	}
}
