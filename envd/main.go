// Command envd is the daemon inside every sandbox. As `envd init` it is also the
// first process: it mounts the disk, sets up the network and starts itself again
// as the daemon.
package main

import (
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"

	"aenv/envd/internal/boot"
	"aenv/envd/internal/freeze"
	"aenv/envd/internal/identity"
	"aenv/envd/internal/server"
)

// version is the E2B daemon version whose features are met. Clients switch on
// features by it: docs/envd.md says what of each is met.
const version = "0.6.4"

func main() {
	args := os.Args[1:]
	command := "init"
	if len(args) > 0 {
		command, args = args[0], args[1:]
	} else if os.Getpid() != 1 && os.Args[0] != "/init" {
		fmt.Fprintln(os.Stderr, "usage: envd init | serve [flags] | container [flags] | bridge [flags] | deleted | stopped | pack | version")
		os.Exit(2)
	}
	if os.Getpid() == 1 && (filepath.Base(os.Args[0]) == "init" || command == "init") {
		// The kernel passes unknown words of its command line on to init.
		boot.Main()
		return
	}
	switch command {
	case "init":
		boot.Main()
	case "serve":
		if os.Getpid() == 1 {
			// First process of a container: orphans need somebody to reap them.
			os.Exit(boot.Supervise(append([]string{"serve"}, args...)))
		}
		if err := serve(args); err != nil {
			fmt.Fprintln(os.Stderr, "envd:", err)
			os.Exit(1)
		}
	case "container":
		os.Exit(container(args))
	case "bridge":
		if err := bridge(args); err != nil {
			fmt.Fprintln(os.Stderr, "envd:", err)
			os.Exit(1)
		}
	case "deleted":
		if err := boot.ListDeleted(os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "envd:", err)
			os.Exit(1)
		}
	case "stopped":
		if err := boot.ListStopped(os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "envd:", err)
			os.Exit(1)
		}
	case "pack":
		if err := boot.PackDisk(os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "envd:", err)
			os.Exit(1)
		}
	case "version":
		fmt.Println(version)
	default:
		fmt.Fprintf(os.Stderr, "envd: unknown command %q: use init, serve, container, bridge, deleted, stopped, pack or version\n", command)
		os.Exit(2)
	}
}

func logf(format string, args ...any) { fmt.Fprintf(os.Stderr, "envd: "+format+"\n", args...) }

func container(args []string) int {
	flags := flag.NewFlagSet("container", flag.ExitOnError)
	dns := flags.String("dns", "", "name servers, separated by commas")
	_ = flags.Parse(args)
	return boot.Container(*dns)
}

func bridge(args []string) error {
	flags := flag.NewFlagSet("bridge", flag.ExitOnError)
	port := flags.Int("port", 49983, "TCP port of this machine")
	_ = flags.Parse(args)
	return boot.Bridge(*port)
}

func serve(args []string) error {
	flags := flag.NewFlagSet("serve", flag.ExitOnError)
	port := flags.Int("port", 49983, "TCP port; 0 picks a free one")
	listen := flags.String("listen", "0.0.0.0", "address to listen on")
	hostTest := flags.Bool("host-test", false, "never change the clock, names or entropy of this machine")
	console := flags.Bool("console", false, "print the ready line to /dev/console instead of standard output")
	cgroup := flags.String("cgroup", "", "cgroup v2 directory for the processes of users, to freeze them for a capture")
	user := flags.String("user", "", "default user until /init names one (default root)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	syscall.Umask(0o022)
	if *console {
		// Without the daemon the sandbox is lost: the kernel should pick a process
		// of the user first. Each process it starts is put back to 0.
		_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(*listen, strconv.Itoa(*port)))
	if err != nil {
		return err
	}
	s := server.New(version, identity.NewState(*user, *hostTest, logf), freeze.Open(*cgroup, logf))
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-stop
		s.Close()
	}()
	ready(*console, l.Addr())
	return s.Serve(l)
}

// ready tells whoever started the daemon that it answers.
func ready(console bool, addr net.Addr) {
	if !console {
		fmt.Printf("aenv-ready %s %s\n", version, addr)
		return
	}
	f, err := os.OpenFile("/dev/console", os.O_WRONLY|syscall.O_NOCTTY, 0)
	if err != nil {
		logf("cannot open the console: %v", err)
		return
	}
	defer f.Close()
	fmt.Fprintf(f, "aenv-ready %s\n", version)
}
