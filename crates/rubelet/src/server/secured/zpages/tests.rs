//! Both pages compared with the responses of upstream's handlers to the same headers.

use axum::http::HeaderValue;
use rubelet_core::time::Uptime;

use super::*;

fn now() -> Now {
    Now { uptime: Uptime::from_secs(3_725), wall: "2026-11-16T06:49:40.25Z".parse().unwrap() }
}

async fn ask(accept: &str, agent: &str) -> String {
    let headers = [(header::ACCEPT, accept), (header::USER_AGENT, agent)]
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| (name, HeaderValue::from_str(value).unwrap()));
    let page = Page { kind: "Flagz", endpoint: "flagz", document: json!({ "flags": { "a": "1.36", "b": "x" } }) };
    let answer = page.answer(&Wish::of(&headers.collect(), None), || "the text".to_owned());
    let mut shown = answer.status().as_str().to_owned();
    for name in [header::CONTENT_TYPE, header::WARNING] {
        if let Some(value) = answer.headers().get(name) {
            shown.push_str(&format!(" {}", value.to_str().unwrap()));
        }
    }
    let body = axum::body::to_bytes(answer.into_body(), 10_000).await.unwrap();
    format!("{shown}\n{}", String::from_utf8(body.to_vec()).unwrap())
}

const TEXT: &str = "200 text/plain; charset=utf-8\nthe text";

#[tokio::test]
async fn a_caller_gets_the_form_upstream_would_give_it() {
    let structured = "application/json;v=v1beta1;g=config.k8s.io;as=Flagz";
    let (wrong, other) = ("application/json;v=v1;g=config.k8s.io;as=Flagz", "text/html,*/*;q=0.8");
    for accept in ["", " ", "*/*", "*", "text/*", "text/plain", other, &format!("{wrong}, text/plain;q=0.1")] {
        assert_eq!(ask(accept, "").await, TEXT, "{accept:?}");
    }
    let json = "200 application/json;g=config.k8s.io;v=v1beta1;as=Flagz\n\
                {\"kind\":\"Flagz\",\"apiVersion\":\"config.k8s.io/v1beta1\",\"metadata\":{\"name\":\"kubelet\"},\
                \"flags\":{\"a\":\"1.36\",\"b\":\"x\"}}\n";
    let any = "*/*;v=v1beta1;g=config.k8s.io;as=Flagz";
    for accept in [structured, any, &format!("text/plain;q=0.1, {structured}")] {
        assert_eq!(ask(accept, "").await, json, "{accept:?}");
    }
    for (accept, agent) in [(structured, "curl/8"), (&*format!("{structured};pretty=1"), "")] {
        let pretty = ask(accept, agent).await;
        assert!(pretty.ends_with("  \"flags\": {\n    \"a\": \"1.36\",\n    \"b\": \"x\"\n  }\n}"), "{pretty}");
    }
    insta::assert_snapshot!(ask("application/json;v=v1alpha1;g=config.k8s.io;as=Flagz", "").await, @r#"
    200 application/json;g=config.k8s.io;v=v1alpha1;as=Flagz 299 - "This version of the flagz endpoint is deprecated. Please use a newer version."
    {"kind":"Flagz","apiVersion":"config.k8s.io/v1alpha1","metadata":{"name":"kubelet"},"flags":{"a":"1.36","b":"x"}}
    "#);
    insta::assert_snapshot!(ask("application/yaml;v=v1beta1;g=config.k8s.io;as=Flagz", "").await, @r#"
    200 application/yaml;g=config.k8s.io;v=v1beta1;as=Flagz
    apiVersion: "config.k8s.io/v1beta1"
    flags:
      a: "1.36"
      b: "x"
    kind: "Flagz"
    metadata:
      name: "kubelet"
    "#);
}

#[tokio::test]
async fn unacceptable_media_type_gets_406_in_accepted_format() {
    let compact = format!(
        "406 application/json\n{{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"metadata\":{{}},\"status\":\"Failure\",\
         \"message\":\"{UNACCEPTABLE}\",\"reason\":\"NotAcceptable\",\"code\":406}}\n"
    );
    for accept in ["application/json", "application/*", "application/json;stream=watch"] {
        assert_eq!(ask(accept, "").await, compact, "{accept:?}");
    }
    let converted = "application/json;v=v1;g=config.k8s.io;as=Flagz";
    for accept in ["application/xml", "application/cbor", "rubbish", "text/plain;as=Flagz", converted] {
        let answer = ask(accept, "").await;
        assert!(answer.starts_with("406 application/json\n{\n  \"kind\": \"Status\",\n"), "{accept}: {answer}");
        assert!(answer.ends_with("\"code\": 406\n}"), "{accept}: {answer}");
    }
    let yaml = ask("application/yaml", "").await;
    assert!(yaml.starts_with("406 application/yaml\napiVersion: \"v1\"\ncode: 406\nkind: \"Status\"\n"), "{yaml}");
}

#[test]
fn statusz_shows_start_time() {
    let status = Status::new(now(), vec!["/configz", "/healthz"]);
    let text = status.text(delimiter(1)).replace(status.binary_version, "VERSION");
    insta::assert_snapshot!(text, @r"

    kubelet statusz
    Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.

    Started:  Mon Nov 16 05:47:35 UTC 2026
    Up:  1 hr 02 min 05 sec
    Go version:  rustc
    Binary version:  VERSION
    Emulation version:  1.36
    Paths:  /configz /healthz
    ");
    let document = serde_json::to_value(&status).unwrap();
    assert_eq!(document["startTime"], "2026-11-16T05:47:35Z");
    assert_eq!(document["uptimeSeconds"], 3_725);
    assert!(document.get("started").is_none());
}
