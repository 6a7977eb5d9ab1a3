package server

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"aenv/envd/internal/freeze"
	"aenv/envd/internal/identity"
)

type client struct {
	t    *testing.T
	base string
}

func serve(t *testing.T) client {
	t.Helper()
	state := identity.NewState("", true, t.Logf)
	s := New("1.2.3", state, &freeze.Freezer{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return client{t, "http://" + l.Addr().String()}
}

func (c client) do(method, path, body string, headers ...string) (int, string, http.Header) {
	c.t.Helper()
	r, err := http.NewRequest(method, c.base+path, strings.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}).Do(r)
	if err != nil {
		c.t.Fatal(err)
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	return res.StatusCode, string(data), res.Header
}

func (c client) want(status int, method, path, body string, headers ...string) string {
	c.t.Helper()
	got, text, _ := c.do(method, path, body, headers...)
	if got != status {
		c.t.Errorf("%s %s: %d %s, want %d", method, path, got, text, status)
	}
	return text
}

func TestTokenRules(t *testing.T) {
	c := serve(t)
	c.want(200, "GET", "/envs", "")
	c.want(204, "POST", "/init", `{"accessToken":"secret"}`)
	good, bad := []string{"X-Access-Token", "secret"}, []string{"X-Access-Token", "secreT"}
	for _, path := range []string{"/envs", "/metrics", "/aenv/info", "/files?path=/x", "/aenv/archive?path=" + t.TempDir(), "/aenv/connect?port=1", "/nothing"} {
		c.want(401, "GET", path, "")
		c.want(401, "GET", path, "", bad...)
		if status, _, _ := c.do("GET", path, "", good...); status == 401 {
			t.Errorf("%s: the right token is refused", path)
		}
	}
	text := c.want(401, "POST", "/process.Process/List", "{}", "Content-Type", "application/json")
	if !strings.Contains(text, `"code":"unauthenticated"`) {
		t.Error(text)
	}
	c.want(401, "POST", "/aenv/detach", "")
	c.want(204, "GET", "/health", "")
	c.want(401, "GET", "/files?path=/x&signature=v1_x", "")
	c.want(401, "GET", "/files?path=/x&signature=v1_x", "", bad...)
	c.want(401, "POST", "/init", `{}`, good...)
	c.want(409, "POST", "/init", `{"accessToken":"other"}`)
	c.want(204, "POST", "/init", `{"accessToken":"secret"}`)
	c.want(204, "POST", "/aenv/detach?sync=1", "", good...)
	c.want(200, "GET", "/envs", "")
	c.want(204, "POST", "/init", `{"accessToken":"other"}`)
	c.want(401, "GET", "/envs", "", good...)
	c.want(200, "GET", "/envs", "", "X-Access-Token", "other")
}

func TestInitRefusesWhatItCannotDo(t *testing.T) {
	c := serve(t)
	for _, body := range []string{
		`{`, `[]`, `{"unknown":1}`, `{"hyperloopIP":"1.2.3.4"}`, `{"volumeMounts":[{"path":"/x"}]}`, `{"caBundle":"x"}`,
		`{"timestamp":"yesterday"}`, `{"entropy":"*"}`, `{"machineId":"xyz"}`, `{"bootId":"xyz"}`, `{"hostname":"a b"}`,
		`{"hostname":"-a"}`, `{"envVars":{"A=B":"x"}}`, `{"envVars":{"A":"\u0000"}}`,
		`{"entropy":"` + strings.Repeat("AAAA", 171) + `"}`,
	} {
		text := c.want(400, "POST", "/init", body)
		var e struct {
			Code    int
			Message string
		}
		if err := json.Unmarshal([]byte(text), &e); err != nil || e.Code != 400 || e.Message == "" {
			t.Errorf("%s: %s", body, text)
		}
	}
}

func TestInitReplacesWhatItNames(t *testing.T) {
	c := serve(t)
	c.want(204, "POST", "/init", `{"envVars":{"A":"1","B":"2"}}`)
	c.want(204, "POST", "/init", `{"defaultWorkdir":"/tmp"}`)
	if text := c.want(200, "GET", "/envs", ""); text != `{"A":"1","B":"2"}` {
		t.Error(text)
	}
	c.want(204, "POST", "/init", `{"envVars":{"C":"3"},"hostname":"box","machineId":"0123456789abcdef0123456789abcdef","entropy":"AAAA"}`)
	if text := c.want(200, "GET", "/envs", ""); text != `{"C":"3"}` {
		t.Error(text)
	}
	first := c.want(200, "GET", "/aenv/info", "")
	if !strings.Contains(first, `"hostname":"box","machineId":"0123456789abcdef0123456789abcdef"`) {
		t.Error(first)
	}
	c.want(204, "POST", "/init", `{"entropy":"AAAB","restored":true}`)
	if second := c.want(200, "GET", "/aenv/info", ""); bootOf(t, first) == bootOf(t, second) {
		t.Error("other entropy gave the same boot id")
	}
}

func bootOf(t *testing.T, text string) string {
	var v struct{ BootID string }
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	return v.BootID
}

func TestWhatIsMissingSaysSo(t *testing.T) {
	c := serve(t)
	c.want(404, "GET", "/nothing", "")
	text := c.want(501, "POST", "/process.Process/Nothing", `{}`, "Content-Type", "application/json")
	if !strings.Contains(text, `"code":"unimplemented"`) {
		t.Error(text)
	}
}

func TestFiles(t *testing.T) {
	c, dir := serve(t), t.TempDir()
	path := filepath.Join(dir, "new/deep/a.txt")
	octet := []string{"Content-Type", "application/octet-stream"}
	user := "&username=" + me()
	if text := c.want(200, "POST", "/files?path="+path+user, "0123456789", octet...); !strings.Contains(text, `"name":"a.txt","type":"file"`) {
		t.Error(text)
	}
	if text := c.want(206, "GET", "/files?path="+path+user, "", "Range", "bytes=2-4"); text != "234" {
		t.Error(text)
	}
	status, text, h := c.do("GET", "/files?path="+path+user, "", "Accept-Encoding", "gzip")
	if status != 200 || h.Get("Content-Encoding") != "gzip" || text == "0123456789" {
		t.Error(status, h)
	}
	c.want(416, "GET", "/files?path="+path+user, "", "Range", "bytes=50-")
	c.want(406, "GET", "/files?path="+path+user, "", "Accept-Encoding", "br, identity;q=0")
	c.want(400, "GET", "/files?path="+path+user, "", "Accept-Encoding", "gzip;q=x")
	c.want(400, "GET", "/files?path="+dir+user, "")
	c.want(404, "GET", "/files?path="+dir+"/none"+user, "")
	c.want(401, "GET", "/files?path="+path+"&username=no-such-user", "")
	c.want(400, "GET", "/files?path=~other"+user, "")
	c.want(400, "GET", "/files?path=/dev/null"+user, "")
	c.want(400, "POST", "/files?path="+dir+user, "x", octet...)
	c.want(400, "POST", "/files?username="+me(), "x", octet...)
	c.want(400, "POST", "/files?path="+path+user, "x", "Content-Type", "text/plain")
	c.want(400, "POST", "/files?path="+path+user, "x", append(octet, "Content-Encoding", "gzip")...)
}

func me() string {
	if os.Getuid() == 0 {
		return "root"
	}
	return itoa(os.Getuid())
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

func TestMultipartKeepsDirectories(t *testing.T) {
	c, dir := serve(t), t.TempDir()
	form := func(names ...string) (string, string) {
		buf := &bytes.Buffer{}
		w := multipart.NewWriter(buf)
		for _, name := range names {
			part, _ := w.CreateFormFile("file", "x")
			_, _ = part.Write([]byte(name))
		}
		w.Close()
		text := buf.String()
		for _, name := range names {
			text = strings.Replace(text, `filename="x"`, `filename="`+name+`"`, 1)
		}
		return text, w.FormDataContentType()
	}
	body, contentType := form(dir+"/a/one", dir+"/b/two")
	text := c.want(200, "POST", "/files?username="+me(), body, "Content-Type", contentType)
	var written []struct{ Path, Name, Type string }
	if err := json.Unmarshal([]byte(text), &written); err != nil || len(written) != 2 || written[1].Path != dir+"/b/two" {
		t.Error(text, err)
	}
	body, contentType = form(dir+"/same", dir+"/./same", dir+"/same")
	c.want(400, "POST", "/files?username="+me(), body, "Content-Type", contentType)
	body, contentType = form()
	c.want(400, "POST", "/files?username="+me(), body, "Content-Type", contentType)
}

func TestSettleEndsWhatTheDaemonStarted(t *testing.T) {
	c := serve(t)
	start := `{"process":{"cmd":"/bin/sh","args":["-c","trap '' TERM; sleep 41 & sleep 42 & echo"],"cwd":"/"},"stdin":false}`
	frame := append([]byte{0, 0, 0, 0, byte(len(start))}, start...)
	auth := "Basic " + basic(me()+":")
	_, text, _ := c.do("POST", "/process.Process/Start", string(frame), "Content-Type", "application/connect+json", "Authorization", auth)
	if !strings.Contains(text, "exit status 0") {
		t.Fatal(text)
	}
	c.want(204, "POST", "/aenv/settle", "")
}

func basic(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }
