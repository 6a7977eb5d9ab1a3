package filesystem

import (
	"errors"
	"os"
	"path"
	"syscall"
	"time"

	"aenv/envd/internal/connect"
)

// networkMounts are the file systems whose changes elsewhere nobody here hears
// of (include/uapi/linux/magic.h): NFS, SMB, CIFS, SMB2, FUSE.
var networkMounts = map[uint32]bool{0x6969: true, 0x517b: true, 0xff534d42: true, 0xfe534d42: true, 0x65735546: true}

// watched opens the tree that a request names.
func (s *Service) watched(call *connect.Call, req *WatchRequest) (*tree, error) {
	root, _, err := s.resolve(call, req.Path)
	if err != nil {
		return nil, err
	}
	st, err := os.Stat(root)
	if err != nil {
		return nil, pathError(root, err)
	}
	if !st.IsDir() {
		return nil, connect.Errorf(connect.InvalidArgument, "path is not a directory: %s", root)
	}
	var fs syscall.Statfs_t
	if err := syscall.Statfs(root, &fs); err != nil {
		return nil, pathError(root, err)
	}
	if networkMounts[uint32(fs.Type)] && !req.allowNetwork() {
		return nil, connect.Errorf(connect.InvalidArgument,
			"cannot watch %s: it is on a network file system, whose changes are not all seen (allowNetworkMounts)", root)
	}
	return newTree(root, req.Recursive, &s.watchers.dirs)
}

// event words a change; with a describer also the entry as it is now, if it
// still exists.
func (d *describer) event(root string, c change) *FilesystemEvent {
	e := &FilesystemEvent{Name: c.name, Type: c.kind}
	if d == nil {
		return e
	}
	full := path.Join(root, c.name)
	if info, err := os.Lstat(full); err == nil {
		e.Entry, _ = d.entry(full, info)
	}
	return e
}

func (s *Service) describerIf(wanted bool) *describer {
	if !wanted {
		return nil
	}
	return s.describer()
}

// watchDir streams the changes of a directory. The stream ends by itself when
// the directory is gone, after it told so.
func (s *Service) watchDir(call *connect.Call, req *WatchRequest, send func(any) error) error {
	interval, err := call.PingInterval()
	if err != nil {
		return err
	}
	if err := s.watchers.enter(); err != nil {
		return err
	}
	defer s.watchers.leave()
	t, err := s.watched(call, req)
	if err != nil {
		return err
	}
	changes, ended := make(chan change), make(chan error, 1)
	go func() {
		ended <- t.run(func(c change) error {
			select {
			case changes <- c:
				return nil
			case <-call.Done():
				return call.Err()
			}
		})
	}()
	defer t.close()
	if err := send(WatchMessage{Start: &Empty{}}); err != nil {
		return err
	}
	ping := time.NewTicker(interval)
	defer ping.Stop()
	for {
		select {
		case <-call.Done():
			return call.Ended()
		case <-ping.C:
			err = send(WatchMessage{Keepalive: &Empty{}})
		case c := <-changes:
			err = send(WatchMessage{Filesystem: s.describerIf(req.includeEntry()).event(t.root, c)})
		case err := <-ended:
			if errors.Is(err, errEnded) {
				return nil
			}
			return err
		}
		if err != nil {
			return err
		}
	}
}
