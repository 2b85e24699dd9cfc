//! Tests over the real port.

use std::{fs, os::unix::fs::symlink, path::Path};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{super::tests::Port, *};

/// A directory of logs: a file, a directory, links in and out, and a special file.
fn make_logs(dir: &Path) {
    fs::write(dir.join("a.log"), "hi\n").unwrap();
    fs::create_dir(dir.join("d")).unwrap();
    fs::write(dir.join("d/b.log"), "b\n").unwrap();
    fs::write(dir.join("d/<x> & y:z"), "odd\n").unwrap();
    symlink(dir.join("a.log"), dir.join("d/full")).unwrap();
    symlink("../a.log", dir.join("d/relative")).unwrap();
    symlink("/etc/passwd", dir.join("out")).unwrap();
    symlink("/etc", dir.join("etc")).unwrap();
    symlink("../kubelet.key", dir.join("key")).unwrap();
    symlink("/proc/self/environ", dir.join("d/environ")).unwrap();
    std::os::unix::net::UnixListener::bind(dir.join("socket")).unwrap();
    fs::write(dir.join("page.html"), "<script>alert(1)</script>\n").unwrap();
    fs::write(dir.join("bytes"), b"\x1f\x8b\x08\0").unwrap();
}

async fn ask(port: &Port, path: &str, headers: &str) -> (String, String) {
    let root = port.authority.client("root");
    let mut stream = port.connect(Some(&root), b"http/1.1").await;
    let head = format!("GET /logs/{path} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_lowercase(), body.to_owned())
}

async fn shown(port: &Port, path: &str) -> String {
    let (head, body) = ask(port, path, "").await;
    let header = |name: &str| {
        let line = head.lines().find(|line| line.starts_with(&format!("{name}: ")));
        line.map(|line| format!(" {}", line.split_once(": ").unwrap().1)).unwrap_or_default()
    };
    let status = head.split(' ').nth(1).unwrap();
    format!("{path:26} {status}{}{} {body:?}\n", header("content-type"), header("location"))
}

#[tokio::test]
async fn log_files_are_served_like_upstream_without_escaping_links() {
    let port = Port::open(false).await;
    make_logs(&port.dir.path().join("var-log"));
    let mut answers = String::new();
    let paths = [
        "",
        "a.log",
        "a.log?x=1",
        "d",
        "d?x=1",
        "d/",
        "a.log/",
        "nope",
        "a.log/b",
        "d/full",
        "d/relative",
        "out",
        "etc/passwd",
        "key",
        "d/environ",
        "socket",
        "page.html",
        "bytes",
        "d/%3Cx%3E%20&%20y:z",
        "x%00y",
        "%ff",
    ];
    for path in paths {
        answers.push_str(&shown(&port, path).await);
    }
    port.end().await;
    insta::assert_snapshot!(answers, @r#"
                               200 text/html; charset=utf-8 "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n<a href=\"a.log\">a.log</a>\n<a href=\"bytes\">bytes</a>\n<a href=\"d/\">d/</a>\n<a href=\"etc\">etc</a>\n<a href=\"key\">key</a>\n<a href=\"out\">out</a>\n<a href=\"page.html\">page.html</a>\n<a href=\"socket\">socket</a>\n</pre>\n"
    a.log                      200 text/plain; charset=utf-8 "hi\n"
    a.log?x=1                  200 text/plain; charset=utf-8 "hi\n"
    d                          301 d/ ""
    d?x=1                      301 d/?x=1 ""
    d/                         200 text/html; charset=utf-8 "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n<a href=\"./%3Cx%3E%20&amp;%20y:z\">&lt;x&gt; &amp; y:z</a>\n<a href=\"b.log\">b.log</a>\n<a href=\"environ\">environ</a>\n<a href=\"full\">full</a>\n<a href=\"relative\">relative</a>\n</pre>\n"
    a.log/                     301 ../a.log ""
    nope                       404 text/plain; charset=utf-8 "404 page not found\n"
    a.log/b                    404 text/plain; charset=utf-8 "404 page not found\n"
    d/full                     200 text/plain; charset=utf-8 "hi\n"
    d/relative                 200 text/plain; charset=utf-8 "hi\n"
    out                        403 text/plain; charset=utf-8 "403 Forbidden\n"
    etc/passwd                 403 text/plain; charset=utf-8 "403 Forbidden\n"
    key                        403 text/plain; charset=utf-8 "403 Forbidden\n"
    d/environ                  403 text/plain; charset=utf-8 "403 Forbidden\n"
    socket                     403 text/plain; charset=utf-8 "403 Forbidden\n"
    page.html                  200 text/plain; charset=utf-8 "<script>alert(1)</script>\n"
    bytes                      200 application/x-gzip "\u{1f}�\u{8}\0"
    d/%3Cx%3E%20&%20y:z        200 text/plain; charset=utf-8 "odd\n"
    x%00y                      404 text/plain; charset=utf-8 "404 page not found\n"
    %ff                        400 text/plain; charset=utf-8 "Invalid URL: Invalid UTF-8 in `path`"
    "#);
}

#[tokio::test]
async fn no_spelling_of_a_path_leads_out_of_the_directory() {
    let port = Port::open(false).await;
    make_logs(&port.dir.path().join("var-log"));
    fs::write(port.dir.path().join("secret"), "secret").unwrap();
    let ups = [
        "..",
        "%2e%2e",
        "%2E.",
        ".%2e",
        "..%00",
        "..;",
        "%252e%252e",
        "%c0%ae%c0%ae",
        "..%5c",
        "..\\",
        "....",
        "%u002e%u002e",
    ];
    let slashes = ["/", "%2f", "%2F", "//", "%5c", "\\", "%252f", "%c0%af", "/./"];
    for up in ups {
        for slash in slashes {
            let up = format!("{up}{slash}");
            let paths = [
                format!("{up}secret"),
                format!("d/{up}./{up}kubelet.key"),
                up.repeat(9) + &format!("etc{slash}passwd"),
            ];
            for path in paths {
                let (head, body) = ask(&port, &path, "").await;
                let status = head.split(' ').nth(1).unwrap();
                assert!(["404", "400", "301", "403"].contains(&status), "{path}: {head}");
                assert!(!body.contains("secret") && !body.contains("root:") && !body.contains("KEY"), "{path}: {body}");
            }
        }
    }
    port.end().await;
}

#[tokio::test]
async fn range_and_conditional_requests_are_served() {
    let port = Port::open(false).await;
    make_logs(&port.dir.path().join("var-log"));
    let (head, body) = ask(&port, "a.log", "Range: bytes=1-\r\n").await;
    assert!(head.starts_with("http/1.1 206 ") && head.contains("content-range: bytes 1-2/3"), "{head}");
    assert_eq!(body, "i\n");
    let (head, body) = ask(&port, "a.log", "Range: bytes=9-\r\n").await;
    assert!(head.starts_with("http/1.1 416 ") && head.contains("content-range: bytes */3"), "{head}");
    assert_eq!(body, "invalid range: failed to overlap\n");
    for path in ["a.log", "d/"] {
        let (head, body) = ask(&port, path, "If-Modified-Since: Mon, 01 Jan 2046 00:00:00 GMT\r\n").await;
        assert!(head.starts_with("http/1.1 304 ") && body.is_empty(), "{head} {body}");
    }
    port.end().await;
}

#[tokio::test]
async fn queries_are_judged_in_upstreams_words() {
    let port = Port::open(false).await;
    make_logs(&port.dir.path().join("var-log"));
    let mut answers = String::new();
    let long = format!("?query={}", "x".repeat(257));
    let queries = [
        "?query=",
        "?query=%20",
        "?query=a&query=b&query=c&query=d&query=e",
        "?query=a%3Bb",
        &long,
        "?query=/a.log",
        "?query=d/b.log",
        "?query=d%5Cb.log",
        "?query=d/nope",
        "?query=d/environ",
        "?query=d/b.log&query=a",
        "?query=d/b.log&query=d/c",
        "?query=d/b.log&tailLines=1",
        "?query=d/../../x/y",
        "?query=a",
        "?query=nope",
        "?query=d",
        "?query=out",
        "?query=a&tailLines=3",
        "?tailLines=1",
        "?query=a&tailLines=x",
        "?query=a&tailLines=-1",
        "?query=a&tailLines=100001",
        "?query=a&boot=1",
        "?query=a&boot=x&sinceTime=y&untilTime=z",
        "?query=a&sinceTime=2026-01-02T00:00:00Z&untilTime=2026-01-01T00:00:00Z",
        "a.log?query=x",
        "?query=a&boot=99999999999999999999",
    ];
    for query in queries {
        let (head, body) = ask(&port, query, "").await;
        let body = body.replace(&"x".repeat(257), "xxx…");
        answers.push_str(&format!("{query:.60} {} {body:?}\n", head.split(' ').nth(1).unwrap()));
    }
    port.end().await;
    insta::assert_snapshot!(answers, @r#"
    ?query= 400 "query: Invalid value: [\"\"]: may not be empty\n"
    ?query=%20 400 "query: Invalid value: [\" \"]: may not be empty\n"
    ?query=a&query=b&query=c&query=d&query=e 406 "query: Too many: 5: must have at most 4 items\n"
    ?query=a%3Bb 406 "query: Invalid value: \"a;b\": input contains unsupported characters\n"
    ?query=xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx 406 "query: Invalid value: \"xxx…\": length must be less than 256\n"
    ?query=/a.log 406 "query: Invalid value: [\"/a.log\"]: statat /a.log: path escapes from parent\n"
    ?query=d/b.log 200 "b\n"
    ?query=d%5Cb.log 406 "query: Invalid value: [\"d\\\\b.log\"]: statat d\\b.log: no such file or directory\n"
    ?query=d/nope 406 "query: Invalid value: [\"d/nope\"]: statat d/nope: no such file or directory\n"
    ?query=d/environ 406 "query: Invalid value: [\"d/environ\"]: statat d/environ: path escapes from parent\n"
    ?query=d/b.log&query=a 406 "query: Invalid value: \"[d/b.log], [a]\": cannot specify a file and service\n"
    ?query=d/b.log&query=d/c 406 "query: Invalid value: [\"d/b.log\",\"d/c\"]: cannot specify more than one file\n"
    ?query=d/b.log&tailLines=1 406 "query: Invalid value: [\"d/b.log\"]: cannot specify file with options\n"
    ?query=d/../../x/y 406 "query: Invalid value: [\"d/../../x/y\"]: statat d/../../x/y: path escapes from parent\n"
    ?query=a 200 "3\r\nhi\n\r\n0\r\n\r\n"
    ?query=nope 200 "18\r\n\nlog not found for nope\n\r\n0\r\n\r\n"
    ?query=d 200 "15\r\n\nlog not found for d\n\r\n0\r\n\r\n"
    ?query=out 200 "2E\r\n\nerror getting log for out: permission denied\n\r\n0\r\n\r\n"
    ?query=a&tailLines=3 200 "58\r\n\noptions present and query resolved to log files for [a]\ntry without specifying options\n\r\n0\r\n\r\n"
    ?tailLines=1 406 "query: Required value: cannot be empty with options\n"
    ?query=a&tailLines=x 400 "tailLines: Invalid value: \"x\": strconv.Atoi: parsing \"x\": invalid syntax\n"
    ?query=a&tailLines=-1 406 "tailLines: Invalid value: -1: must be between 0 and 100000, inclusive\n"
    ?query=a&tailLines=100001 406 "tailLines: Invalid value: 100001: must be between 0 and 100000, inclusive\n"
    ?query=a&boot=1 406 "boot: Invalid value: 1: must be less than 1\n"
    ?query=a&boot=x&sinceTime=y&untilTime=z 400 "[sinceTime: Invalid value: \"y\": invalid time format, untilTime: Invalid value: \"z\": invalid time format, boot: Invalid value: \"x\": strconv.Atoi: parsing \"x\": invalid syntax]\n"
    ?query=a&sinceTime=2026-01-02T00:00:00Z&untilTime=2026-01-01 406 "untilTime: Invalid value: \"2026-01-01T00:00:00Z\": must be after `sinceTime`\n"
    a.log?query=x 406 "path not allowed in query mode\n"
    ?query=a&boot=99999999999999999999 400 "boot: Invalid value: \"99999999999999999999\": strconv.Atoi: parsing \"99999999999999999999\": value out of range\n"
    "#);
}

#[test]
fn each_journalctl_option_is_one_argument() {
    let query = "query=kubelet&sinceTime=2026-01-02T01:00:00%2B01:00&untilTime=2026-01-03T00:00:00Z&tailLines=5&boot=-1\
                 &pattern=a%20b;%20rm%20-rf";
    let query = Query::parse(query).unwrap().unwrap();
    assert_eq!(query.problems(), [""; 0]);
    let told = query.arguments(&query.services);
    assert_eq!(
        told,
        [
            "--utc",
            "--no-pager",
            "--output=short-precise",
            "--since=2026-01-02 00:00:00 UTC",
            "--until=2026-01-03 00:00:00 UTC",
            "--pager-end",
            "--lines=5",
            "--unit=kubelet",
            "--grep=a b; rm -rf",
            "--boot",
            "-1"
        ]
    );
}
