package connect

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"
)

type small struct {
	N Uint32 `pb:"1"`
}

type wide struct {
	Text   string            `pb:"1"`
	Signed int32             `pb:"2,zigzag"`
	Plain  int32             `pb:"3"`
	Long   int64             `pb:"4"`
	Yes    bool              `pb:"5"`
	Raw    Bytes             `pb:"6"`
	Maybe  *string           `pb:"7"`
	Inner  *small            `pb:"8"`
	Always small             `pb:"9"`
	Words  []string          `pb:"10"`
	Many   []*small          `pb:"11"`
	Pairs  map[string]string `pb:"12"`
	At     Timestamp         `pb:"13"`
	MaybeB *Bytes            `pb:"14"`
	Hidden int
}

func marshal(v any) []byte { data, _ := protoCodec{}.Marshal(v); return data }

func full() *wide {
	empty, raw := "", Bytes{1}
	return &wide{Text: "é", Signed: -1, Plain: -1, Long: 1 << 40, Yes: true, Raw: Bytes{0xff}, Maybe: &empty,
		Inner: &small{}, Always: small{300}, Words: []string{"", "b"}, Many: []*small{{1}, {}},
		Pairs: map[string]string{"k": "v", "": ""}, At: NewTimestamp(time.Unix(1, 2)), MaybeB: &raw}
}

func TestProtobufBytesAreThoseOfTheFormat(t *testing.T) {
	const want = "0a02c3a9" + "1001" + "18ffffffffffffffffff01" + "20808080808020" + "2801" + "3201ff" + "3a00" +
		"4200" + "4a0308ac02" + "5200" + "520162" + "5a020801" + "5a00" + "62040a001200" + "62060a016b120176" +
		"6a0408011002" + "720101"
	if got := hex.EncodeToString(marshal(full())); got != want {
		t.Errorf("\n%s\n%s", got, want)
	}
	if got := marshal(wide{}); hex.EncodeToString(got) != "4a006a00" {
		t.Errorf("defaults are written: %x", got)
	}
	if got := marshal(wide{Text: "\xff"}); !bytes.HasPrefix(got, []byte("\x0a\x03\uFFFD")) {
		t.Errorf("a name that is not UTF-8: %x", got)
	}
}

func TestProtobufRoundTrip(t *testing.T) {
	got := new(wide)
	if err := (protoCodec{}).Unmarshal(marshal(full()), got); err != nil || !reflect.DeepEqual(got, full()) {
		t.Errorf("%v\n%+v\n%+v", err, got, full())
	}
}

func TestProtobufReadsWhatAnotherVersionWrites(t *testing.T) {
	for name, text := range map[string]string{
		"unknown number":      "a206" + "0161" + "f801" + "05",
		"unknown fixed":       "a50101020304" + "a1010102030405060708",
		"another wire type":   "0801" + "120161",
		"nothing":             "",
		"the largest number":  "f8ffffff0f" + "00",
		"a map without value": "6200",
	} {
		data, _ := hex.DecodeString(text)
		if err := (protoCodec{}).Unmarshal(data, new(wide)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	merged := new(wide)
	data, _ := hex.DecodeString("42020801" + "4200" + "0a0161" + "0a0162")
	if err := (protoCodec{}).Unmarshal(data, merged); err != nil || merged.Inner.N != 1 || merged.Text != "b" {
		t.Errorf("%v %+v", err, merged)
	}
	low := new(small)
	data, _ = hex.DecodeString("08ffffffffffffffffff01")
	if err := (protoCodec{}).Unmarshal(data, low); err != nil || low.N != 1<<32-1 {
		t.Errorf("%v %v", err, low)
	}
}

func TestProtobufRefusesWhatIsMalformed(t *testing.T) {
	for name, text := range map[string]string{
		"cut key":           "80",
		"cut number":        "1880",
		"65 bits":           "18ffffffffffffffffff02",
		"eleven bytes":      "18ffffffffffffffffffff01",
		"length past end":   "0a05" + "61",
		"length of 2^63":    "0a" + "80808080808080808001",
		"length of 2^64-1":  "0a" + "ffffffffffffffffff01",
		"cut inner":         "42020880",
		"field zero":        "0201",
		"field above range": "f8ffffff1f" + "00",
		"group":             "a306a406",
		"wire type 7":       "0f",
		"cut fixed":         "a501010203",
		"not UTF-8":         "0a01ff",
		"key not UTF-8":     "62030a01ff",
	} {
		data, _ := hex.DecodeString(text)
		if err := (protoCodec{}).Unmarshal(data, new(wide)); err == nil || AsError(err).Code != InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := (protoCodec{}).Unmarshal(bytes.Repeat([]byte{0x52, 0}, maxElements+1), new(wide)); AsError(err).Reason != TooLarge {
		t.Errorf("too many elements: %v", err)
	}
	type nested struct {
		Next *nested `pb:"1"`
	}
	var deep []byte
	for i := 0; i < maxNesting+1; i++ {
		deep = appendBytes(nil, 1, deep)
	}
	if err := (protoCodec{}).Unmarshal(deep, new(nested)); err == nil {
		t.Error("deep nesting is accepted")
	}
}

func FuzzProtobuf(f *testing.F) {
	f.Add(marshal(full()))
	for _, text := range []string{"18ffffffffffffffffff02", "0affffffffffffffffff01", "42020880", "a306a406", "4a044a024a00"} {
		data, _ := hex.DecodeString(text)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var first, second wide
		if (protoCodec{}).Unmarshal(data, &first) != nil {
			return
		}
		// What was understood is written in one form, which means the same.
		once := marshal(&first)
		if err := (protoCodec{}).Unmarshal(once, &second); err != nil {
			t.Fatal(err)
		}
		if again := marshal(&second); !bytes.Equal(once, again) {
			t.Fatalf("%x\n%x", once, again)
		}
	})
}

func FuzzEnvelope(f *testing.F) {
	f.Add(AppendEnvelope(nil, 0, []byte("x")), true)
	f.Add(AppendEnvelope(nil, flagCompressed, compress([]byte("x"))), true)
	f.Add([]byte{1, 0xff, 0xff, 0xff, 0xff}, false)
	f.Fuzz(func(t *testing.T, data []byte, unzip bool) {
		if body, err := ReadEnvelope(bytes.NewReader(data), unzip); err == nil && len(body) > MaxEnvelope {
			t.Fatal(len(body))
		}
	})
}

func TestCompressionBothWays(t *testing.T) {
	h := Unary(func(_ *Call, e *echo) (*echo, error) { return e, nil })
	long := strings.Repeat("a", 5000)
	body := []byte(`{"text":"` + long + `"}`)
	w := call(h, "application/json", compress(body), "Content-Encoding", "gzip", "Accept-Encoding", "br, gzip;q=0.5")
	if w.Code != 200 || w.Header().Get("Content-Encoding") != "gzip" {
		t.Fatalf("%d %v", w.Code, w.Header())
	}
	if plain, err := decompress(w.Body.Bytes(), MaxUnary); err != nil || !bytes.Equal(plain, body) {
		t.Errorf("%v %d bytes", err, len(plain))
	}
	for _, accept := range []string{"", "identity", "gzip;q=0", "gzip; q=0.0", "br"} {
		if w = call(h, "application/json", body, "Accept-Encoding", accept); w.Header().Get("Content-Encoding") != "" {
			t.Errorf("%q: compressed", accept)
		}
	}
	if w = call(h, "application/json", body, "Content-Encoding", "br"); w.Code != 501 {
		t.Errorf("another compression: %d", w.Code)
	}
	if w = call(h, "application/json", body, "Content-Encoding", "gzip"); w.Code != 400 {
		t.Errorf("not gzip: %d", w.Code)
	}
	bomb := compress(bytes.Repeat([]byte(" "), MaxUnary+1))
	if w = call(h, "application/json", bomb, "Content-Encoding", "gzip"); w.Code != 429 {
		t.Errorf("a bomb of %d bytes: %d", len(bomb), w.Code)
	}
}

func TestCompressedEnvelopes(t *testing.T) {
	h := ServerStream(func(_ *Call, e *echo, send func(any) error) error { return send(e) })
	long := []byte(`{"text":"` + strings.Repeat("a", 5000) + `"}`)
	wire := AppendEnvelope(nil, flagCompressed, compress(long))
	w := call(h, "application/connect+json", wire, "Connect-Content-Encoding", "gzip", "Connect-Accept-Encoding", "gzip")
	if w.Header().Get("Connect-Content-Encoding") != "gzip" || w.Body.Len() > 1000 {
		t.Fatalf("%v, %d bytes", w.Header(), w.Body.Len())
	}
	if got, err := ReadEnvelope(w.Body, true); err != nil || !bytes.Equal(got, long) {
		t.Errorf("%v, %d bytes", err, len(got))
	}
	for encoding, code := range map[string]string{"": "invalid_argument", "br": "unimplemented"} {
		w = call(h, "application/connect+json", wire, "Connect-Content-Encoding", encoding)
		if !strings.Contains(w.Body.String(), code) {
			t.Errorf("%q: %s", encoding, w.Body)
		}
	}
	bomb := compress(make([]byte, MaxEnvelope+1))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := ReadEnvelope(bytes.NewReader(AppendEnvelope(nil, flagCompressed, bomb)), true)
	runtime.ReadMemStats(&after)
	if err == nil || AsError(err).Reason != TooLarge || after.TotalAlloc-before.TotalAlloc > 10*MaxEnvelope {
		t.Errorf("%v, %d bytes allocated", err, after.TotalAlloc-before.TotalAlloc)
	}
}

func TestPingInterval(t *testing.T) {
	c := &Call{Header: map[string][]string{}}
	if d, err := c.PingInterval(); d != defaultPing || err != nil {
		t.Error(d, err)
	}
	c.Header.Set("Keepalive-Ping-Interval", "x")
	if _, err := c.PingInterval(); err == nil {
		t.Error("accepted")
	}
}
