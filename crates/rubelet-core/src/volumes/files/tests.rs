//! The files of a volume, source by source.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::test_support::object_of;

fn pod(volume: &Value, more: &Value) -> Pod {
    let mut spec = json!({
        "serviceAccountName": "sa",
        "containers": [{"name": "c", "resources": {"limits": {"memory": "64Mi"}}}],
        "volumes": [volume],
    });
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let metadata = json!({"name": "web", "namespace": "prod", "uid": "u-1", "labels": {"app": "x"}});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
}

fn gathered(volume: &FileVolume) -> Gathered {
    let needs = volume.needs();
    let objects = needs.objects.into_iter().map(|key| {
        let object = |data: &[(&str, &str)]| Ok(Arc::new(object_of(key.kind, data)));
        let lookup = match key.name.as_str() {
            "map" => object(&[("a", "1"), ("b", "2")]),
            "creds" => object(&[("user", "me")]),
            "large" => object(&[("k", &"x".repeat(1 << 20))]),
            "hostile" => object(&[("..data", "x")]),
            _ => Err(key.not_found()),
        };
        (key, lookup)
    });
    let tokens = needs.tokens.into_iter().map(|key| {
        let token = match key.audience.as_deref() {
            Some("nobody") => Err("failed to fetch token: denied".to_owned()),
            audience => Ok(Token {
                token: format!("token for {audience:?}, {} s", key.expiration_secs),
                expires_at: Timestamp::UNIX_EPOCH,
            }),
        };
        (key, token)
    });
    Gathered { objects: Objects(objects.collect()), tokens: tokens.collect(), ..Gathered::default() }
}

fn shown_with(volume: &Value, more: &Value) -> String {
    let pod = pod(volume, more);
    let spec = pod.spec.as_ref().unwrap();
    let volume = FileVolume::of(&pod, spec, &spec.volumes.as_ref().unwrap()[0]).unwrap();
    match volume.files(&pod, &"u-1".into(), &gathered(&volume), Allocatable::default()) {
        Err(error) => format!("error: {error}"),
        Ok(files) => {
            let line = |(path, file): (&PathBuf, &VolumeFile)| {
                let owner = file.owner.map(|owner| format!(" owner {owner}")).unwrap_or_default();
                let content = String::from_utf8_lossy(&file.content);
                format!("{} {:o}{owner}: {content}", path.display(), file.mode)
            };
            files.iter().map(line).collect::<Vec<_>>().join("\n")
        }
    }
}

fn shown(volume: &Value) -> String {
    shown_with(volume, &json!({}))
}

#[test]
fn a_config_map_becomes_a_file_per_key_or_per_item() {
    insta::assert_snapshot!(shown(&json!({"name": "v", "configMap": {"name": "map", "defaultMode": 0o640}})), @"
    a 640: 1
    b 640: 2
    ");
    let items = json!([{"key": "b", "path": "sub/two", "mode": 0o400}, {"key": "a", "path": "./one"}]);
    insta::assert_snapshot!(shown(&json!({"name": "v", "configMap": {"name": "map", "items": items}})), @"
    one 644: 1
    sub/two 400: 2
    ");
}

#[test]
fn missing_object_gives_upstreams_error_unless_optional() {
    let items = json!([{"key": "x", "path": "x"}]);
    let cases = [
        json!({"configMap": {"name": "none"}}),
        json!({"secret": {"secretName": "none"}}),
        json!({"configMap": {"name": "map", "items": items}}),
        json!({"secret": {"secretName": "creds", "items": items}}),
        json!({"configMap": {"name": "none", "optional": true}}),
        json!({"secret": {"secretName": "creds", "items": items, "optional": true}}),
        json!({"projected": {"sources": [{"secret": {"name": "none"}}, {"configMap": {"name": "none"}}]}}),
        json!({"projected": {"sources": [{"serviceAccountToken": {"path": "t", "audience": "nobody"}}]}}),
        json!({"projected": {"sources": [{"clusterTrustBundle": {"path": "t", "name": "n"}}]}}),
    ];
    let lines: Vec<_> = cases.iter().map(|case| format!("{case}\n  {}", shown(case))).collect();
    insta::assert_snapshot!(lines.join("\n"), @r#"
    {"configMap":{"name":"none"}}
      error: configmap "none" not found
    {"secret":{"secretName":"none"}}
      error: secret "none" not found
    {"configMap":{"items":[{"key":"x","path":"x"}],"name":"map"}}
      error: configmap references non-existent config key: x
    {"secret":{"items":[{"key":"x","path":"x"}],"secretName":"creds"}}
      error: references non-existent secret key: x
    {"configMap":{"name":"none","optional":true}}
      
    {"secret":{"items":[{"key":"x","path":"x"}],"optional":true,"secretName":"creds"}}
      
    {"projected":{"sources":[{"secret":{"name":"none"}},{"configMap":{"name":"none"}}]}}
      error: [secret "none" not found, configmap "none" not found]
    {"projected":{"sources":[{"serviceAccountToken":{"audience":"nobody","path":"t"}}]}}
      error: failed to fetch token: denied
    {"projected":{"sources":[{"clusterTrustBundle":{"name":"n","path":"t"}}]}}
      error: while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io "n" not found
    "#);
}

#[test]
fn a_projected_volume_joins_its_sources() {
    let sources = json!([
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"serviceAccountToken": {"path": "vault/token", "audience": "vault"}},
        {"configMap": {"name": "map", "items": [{"key": "a", "path": "ca.crt"}]}},
        {"secret": {"name": "creds"}},
        {"downwardAPI": {"items": [
            {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}},
            {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
            {"path": "memory", "mode": 0o400, "resourceFieldRef": {"containerName": "c", "resource": "limits.memory"}},
        ]}},
    ]);
    insta::assert_snapshot!(shown(&json!({"projected": {"sources": sources}})), @r#"
    ca.crt 644: 1
    labels 644: app="x"
    memory 400: 67108864
    namespace 644: prod
    token 644: token for None, 3607 s
    user 644: me
    vault/token 644: token for Some("vault"), 3600 s
    "#);
}

#[test]
fn token_is_readable_only_by_its_user() {
    let volume =
        json!({"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}, {"secret": {"name": "creds"}}]}});
    let with = |more: Value| shown_with(&volume, &more).replace(": token for None, 3600 s", "").replace('\n', ", ");
    assert_eq!(with(json!({"securityContext": {"fsGroup": 7}})), "t 600, user 644: me");
    assert_eq!(with(json!({"securityContext": {"runAsUser": 9}})), "t 600 owner 9, user 644: me");
    let mixed = json!([
        {"name": "c", "securityContext": {"runAsUser": 9}},
        {"name": "d", "securityContext": {"runAsUser": 8}},
    ]);
    assert_eq!(with(json!({"containers": mixed})), "t 644, user 644: me");
}

#[test]
fn paths_that_lead_out_of_the_volume_are_refused() {
    let at = |path: &str| shown(&json!({"configMap": {"name": "map", "items": [{"key": "a", "path": path}]}}));
    assert_eq!(at("a/../../b"), "error: invalid path: must not contain '..': a/../../b");
    assert_eq!(at("/etc/passwd"), "error: invalid path: must be relative path: /etc/passwd");
    assert_eq!(at("..data"), "error: invalid path: must not start with '..': ..data");
    assert_eq!(at("..a/b"), "error: invalid path: must not start with '..': ..a/b");
    assert_eq!(at(""), "error: invalid path: must not be empty: \"\"");
    assert_eq!(at("a..b"), "a..b 644: 1");
    assert_eq!(
        shown(&json!({"configMap": {"name": "hostile"}})),
        "error: invalid path: must not start with '..': ..data"
    );
}

#[test]
fn volume_named_in_too_many_items_is_refused() {
    let items = |count: usize| (0..count).map(|n| json!({"key": "k", "path": format!("f{n}")})).collect::<Vec<_>>();
    let volume = |count: usize| json!({"name": "v", "configMap": {"name": "large", "items": items(count)}});
    assert_eq!(shown_with(&volume(64), &json!({})).lines().count(), 64);
    assert_eq!(shown_with(&volume(65), &json!({})), "error: the files up to f64 hold more than 67108864 bytes");
    let same: Vec<_> = (0..65).map(|_| json!({"key": "k", "path": "f"})).collect();
    let same = json!({"name": "v", "configMap": {"name": "large", "items": same}});
    assert_eq!(shown_with(&same, &json!({})).lines().count(), 1);
}
