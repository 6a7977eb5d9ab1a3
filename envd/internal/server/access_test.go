package server

import (
	"bufio"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"
)

// signature is that of E2B's SDKs.
func signature(path, operation, user, token, expiration string) string {
	text := path + ":" + operation + ":" + user + ":" + token
	if expiration != "" {
		text += ":" + expiration
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + strings.TrimRight(base64.StdEncoding.EncodeToString(sum[:]), "=")
}

func TestASignatureOpensOneFileForOneOperation(t *testing.T) {
	c, path := serve(t), t.TempDir()+"/f +&"
	c.want(204, "POST", "/init", `{"accessToken":"secret","defaultUser":"`+me()+`"}`)
	octet := []string{"Content-Type", "application/octet-stream"}
	later, past := fmt.Sprint(time.Now().Unix()+60), fmt.Sprint(time.Now().Unix()-2)
	ask := func(status int, method, path, user, signature, expiration string, headers ...string) string {
		t.Helper()
		query := url.Values{"path": {path}}
		for key, value := range map[string]string{"username": user, "signature": signature, "signature_expiration": expiration} {
			if value != "" {
				query.Set(key, value)
			}
		}
		return c.want(status, method, "/files?"+query.Encode(), "content", append(octet, headers...)...)
	}
	ask(200, "POST", path, "", signature(path, "write", "", "secret", ""), "")
	ask(200, "POST", path, me(), signature(path, "write", me(), "secret", later), later)
	if text := ask(200, "GET", path, "", signature(path, "read", "", "secret", later), later); text != "content" {
		t.Error(text)
	}
	read := signature(path, "read", "", "secret", "")
	for name, call := range map[string]func() string{
		"none":            func() string { return ask(401, "GET", path, "", "", "") },
		"other operation": func() string { return ask(401, "POST", path, "", read, "") },
		"other path":      func() string { return ask(401, "GET", path+"x", "", read, "") },
		"other user":      func() string { return ask(401, "GET", path, me(), read, "") },
		"other token":     func() string { return ask(401, "GET", path, "", signature(path, "read", "", "other", ""), "") },
		"added time":      func() string { return ask(401, "GET", path, "", read, later) },
		"expired":         func() string { return ask(401, "GET", path, "", signature(path, "read", "", "secret", past), past) },
		"no time":         func() string { return ask(400, "GET", path, "", read, "soon") },
		"padded":          func() string { return ask(401, "GET", path, "", read+"=", "") },
		"a wrong token":   func() string { return ask(401, "GET", path, "", read, "", "X-Access-Token", "wrong") },
	} {
		if text := call(); !strings.Contains(text, `"message":"`) {
			t.Errorf("%s: %s", name, text)
		}
	}
	c.want(401, "POST", "/files/compose?path=x&signature="+url.QueryEscape(signature("x", "write", "", "secret", "")), `{}`)
}

func TestComposeMakesOneFileOfParts(t *testing.T) {
	c, dir := serve(t), t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(dir+"/"+name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("1", "one ")
	write("2", "two")
	write("whole", "old")
	compose := func(status int, destination string, sources ...string) string {
		t.Helper()
		body := fmt.Sprintf(`{"username":%q,"destination":%q,"source_paths":["%s"]}`, me(), destination, strings.Join(sources, `","`))
		return c.want(status, "POST", "/files/compose", body, "Content-Type", "application/json")
	}
	compose(404, dir+"/whole", dir+"/1", dir+"/none")
	compose(400, dir+"/whole", dir)
	compose(400, dir+"/whole", dir+"/1", dir+"/./whole")
	compose(400, dir, dir+"/1")
	compose(400, "", dir+"/1")
	c.want(400, "POST", "/files/compose", `{"destination":"/x","source_paths":[]}`)
	c.want(400, "POST", "/files/compose", `[`)
	c.want(401, "POST", "/files/compose", `{"username":"no-such-user","destination":"/x","source_paths":["/y"]}`)
	if data, _ := os.ReadFile(dir + "/whole"); string(data) != "old" {
		t.Errorf("a refused call changed the destination: %q", data)
	}
	text := compose(200, dir+"/whole", dir+"/1", dir+"/2")
	if text != fmt.Sprintf(`{"path":%q,"name":"whole","type":"file"}`, dir+"/whole") {
		t.Error(text)
	}
	compose(404, dir+"/whole", dir+"/1")
	if data, _ := os.ReadFile(dir + "/whole"); string(data) != "one two" {
		t.Errorf("%q", data)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("%v", left)
	}
}

func TestADownloadIsResumedOnlyIfTheFileIsTheSame(t *testing.T) {
	c, path := serve(t), t.TempDir()+"/f"
	file := "/files?path=" + path + "&username=" + me()
	c.want(200, "POST", file, "0123456789", "Content-Type", "application/octet-stream")
	_, _, h := c.do("GET", file, "")
	tag := h.Get("ETag")
	c.want(206, "GET", file, "", "Range", "bytes=4-", "If-Range", tag)
	c.want(304, "GET", file, "", "If-None-Match", tag)
	c.want(412, "GET", file, "", "If-Match", `"other"`)
	if _, _, h := c.do("GET", file, "", "Accept-Encoding", "gzip"); h.Get("ETag") != "" {
		t.Error("other bytes have the same tag")
	}
	if err := os.Chtimes(path, time.Time{}, time.Now().Add(time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if text := c.want(200, "GET", file, "", "Range", "bytes=4-", "If-Range", tag); text != "0123456789" {
		t.Error(text)
	}
}

// dial opens a tunnel by hand: bytes that come with the request belong to it.
func dial(t *testing.T, c client, port int, early string) (net.Conn, *http.Response, *bufio.Reader) {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(c.base, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	fmt.Fprintf(conn, "GET /aenv/connect?port=%d HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: aenv-tcp\r\n\r\n%s", port, early)
	reader := bufio.NewReader(conn)
	res, err := http.ReadResponse(reader, nil)
	if err != nil {
		t.Fatal(err)
	}
	return conn, res, reader
}

func TestATunnelLeadsToAServiceOfTheLoopback(t *testing.T) {
	c := serve(t)
	for _, host := range []string{"127.0.0.1", "[::1]"} {
		l, err := net.Listen("tcp", host+":0")
		if err != nil {
			t.Logf("%s: %v", host, err)
			continue
		}
		defer l.Close()
		go func() {
			service, err := l.Accept()
			if err != nil {
				return
			}
			defer service.Close()
			data, _ := io.ReadAll(service) // to the end that the client sends: half is closed, half is open
			fmt.Fprintf(service, "got %s", data)
		}()
		conn, res, reader := dial(t, c, l.Addr().(*net.TCPAddr).Port, "early ")
		if res.StatusCode != 101 || res.Header.Get("Upgrade") != "aenv-tcp" {
			t.Fatal(res.Status)
		}
		fmt.Fprint(conn, "late")
		_ = conn.(*net.TCPConn).CloseWrite()
		if data, err := io.ReadAll(reader); err != nil || string(data) != "got early late" {
			t.Errorf("%q %v", data, err)
		}
	}
}

func TestATunnelSaysWhatItCannot(t *testing.T) {
	c := serve(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	_, res, _ := dial(t, c, l.Addr().(*net.TCPAddr).Port, "")
	if body, _ := io.ReadAll(res.Body); res.StatusCode != 502 || !strings.Contains(string(body), "port is not open") {
		t.Error(res.Status, string(body))
	}
	c.want(400, "GET", "/aenv/connect?port=0", "", "Upgrade", "aenv-tcp")
	c.want(400, "GET", "/aenv/connect?port=65536", "", "Upgrade", "aenv-tcp")
	c.want(426, "GET", "/aenv/connect?port=1", "")
}

func TestARestoredMachineEndsItsTunnels(t *testing.T) {
	c := serve(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, res, reader := dial(t, c, l.Addr().(*net.TCPAddr).Port, "")
	service, err := l.Accept()
	if err != nil || res.StatusCode != 101 {
		t.Fatal(err, res.Status)
	}
	defer service.Close()
	c.want(204, "POST", "/init", `{"restored":true}`)
	if _, err := service.Read(make([]byte, 1)); err == nil {
		t.Error("the service still has its client")
	}
	if _, err := reader.ReadByte(); err == nil {
		t.Error("the client still has its service")
	}
	_ = conn
}
