package boot

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"
	"unsafe"
)

const (
	ethWait = 3 * time.Second
	ethName = "eth0"
)

// network uses the old ioctls: they need no library and no binary.
func network(o Options) {
	sock, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		say("network: %v", err)
		return
	}
	defer syscall.Close(sock)
	if err := linkUp(sock, "lo"); err != nil {
		say("lo: %v", err)
	}
	if o.IP == "" || o.IP == "none" {
		return
	}
	if err := waitFor("/sys/class/net/"+ethName, ethWait); err != nil {
		say("no network: %v", err)
		return
	}
	if err := configure(sock, o); err != nil {
		say("%s: %v", ethName, err)
	}
}

func configure(sock int, o Options) error {
	prefix, err := netip.ParsePrefix(o.IP)
	if err != nil || !prefix.Addr().Is4() {
		return fmt.Errorf("aenv.ip=%s is not an IPv4 address with a prefix length", o.IP)
	}
	if err := setAddress(sock, syscall.SIOCSIFADDR, prefix.Addr().As4()); err != nil {
		return fmt.Errorf("address %s: %w", o.IP, err)
	}
	var mask [4]byte
	binary.BigEndian.PutUint32(mask[:], ^uint32(0)<<(32-prefix.Bits()))
	if err := setAddress(sock, syscall.SIOCSIFNETMASK, mask); err != nil {
		return fmt.Errorf("netmask of %s: %w", o.IP, err)
	}
	if err := linkUp(sock, ethName); err != nil {
		return fmt.Errorf("up: %w", err)
	}
	if o.Gateway == "" || o.Gateway == "none" {
		return nil
	}
	gw, err := netip.ParseAddr(o.Gateway)
	if err != nil || !gw.Is4() {
		return fmt.Errorf("aenv.gw=%s is not an IPv4 address", o.Gateway)
	}
	if err := defaultRoute(sock, gw.As4()); err != nil {
		return fmt.Errorf("route through %s: %w", o.Gateway, err)
	}
	return nil
}

// ifreq is struct ifreq: a name and a union of 24 bytes.
type ifreq struct {
	name [16]byte
	data [24]byte
}

func newIfreq(name string) *ifreq {
	r := &ifreq{}
	copy(r.name[:15], name)
	return r
}

func (r *ifreq) do(sock int, request uintptr) error {
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(sock), request, uintptr(unsafe.Pointer(r)))
	if errno != 0 {
		return errno
	}
	return nil
}

func linkUp(sock int, name string) error {
	r := newIfreq(name)
	if err := r.do(sock, syscall.SIOCGIFFLAGS); err != nil {
		return err
	}
	flags := binary.NativeEndian.Uint16(r.data[:])
	binary.NativeEndian.PutUint16(r.data[:], flags|syscall.IFF_UP|syscall.IFF_RUNNING)
	return r.do(sock, syscall.SIOCSIFFLAGS)
}

// sockaddr is struct sockaddr_in.
func sockaddr(ip [4]byte) (sa [16]byte) {
	binary.NativeEndian.PutUint16(sa[:], syscall.AF_INET)
	copy(sa[4:], ip[:])
	return sa
}

func setAddress(sock int, request uintptr, ip [4]byte) error {
	r := newIfreq(ethName)
	sa := sockaddr(ip)
	copy(r.data[:], sa[:])
	return r.do(sock, request)
}

// rtentry is struct rtentry of 64-bit Linux.
type rtentry struct {
	pad1                  uint64
	dst, gateway, genmask [16]byte
	flags                 uint16
	pad2                  int16
	_                     [4]byte
	pad3                  uint64
	pad4                  uint64 // tos, class and their padding
	metric                int16
	_                     [6]byte
	dev                   *byte
	mtu, window           uint64
	irtt                  uint16
	_                     [6]byte
}

func defaultRoute(sock int, gw [4]byte) error {
	rt := rtentry{dst: sockaddr([4]byte{}), genmask: sockaddr([4]byte{}), gateway: sockaddr(gw),
		flags: syscall.RTF_UP | syscall.RTF_GATEWAY}
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(sock), syscall.SIOCADDRT, uintptr(unsafe.Pointer(&rt)))
	if errno != 0 {
		return os.NewSyscallError("SIOCADDRT", errno)
	}
	return nil
}
