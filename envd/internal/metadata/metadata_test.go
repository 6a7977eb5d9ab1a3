package metadata

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestHeadersBecomeMetadata(t *testing.T) {
	h := http.Header{}
	h.Set("X-Metadata-Build-ID", "7")
	h.Set("X-Metadata-", "nobody")
	h.Set("X-Other", "x")
	got, err := FromHeaders(h)
	if err != nil || !reflect.DeepEqual(got, map[string]string{"build-id": "7"}) {
		t.Error(got, err)
	}
	for key, value := range map[string]string{
		strings.Repeat("k", 247): "x", "a": "\xff", "b": strings.Repeat("x", maxValue+1),
	} {
		if _, err := FromHeaders(http.Header{"X-Metadata-" + key: {value}}); !errors.Is(err, ErrInvalid) {
			t.Errorf("%.20q is accepted: %v", key, err)
		}
	}
}

func TestMetadataIsReplacedAsAWhole(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, want := range []map[string]string{{"a": "1", "b": ""}, {"b": "é", "c": "3"}, nil} {
		err := Replace(int(f.Fd()), want)
		if Unsupported(err) {
			t.Skip("this file system has no user attributes")
		}
		if got := Of(path); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%v: %v, want %v", err, got, want)
		}
	}
	if err := Replace(int(f.Fd()), map[string]string{"a": "1"}); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path, path+".link"); err != nil {
		t.Fatal(err)
	}
	if got := Of(path + ".link"); got != nil {
		t.Errorf("a link is followed: %v", got)
	}
	if got := Of(path + ".none"); got != nil {
		t.Error(got)
	}
}
