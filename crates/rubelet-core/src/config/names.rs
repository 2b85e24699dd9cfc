//! Names of labels, taints and resources, with upstream's messages.
//!
//! Upstream: `apimachinery/pkg/util/validation`, `k8s.io/kubelet/pkg/apis/well_known_labels.go`.

use std::collections::BTreeMap;

const QUALIFIED: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const SUBDOMAIN: &str = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const CHARACTERS: &str =
    "consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";

/// Labels of Kubernetes' own namespaces that a node may set on itself.
const NODE_LABELS: &[&str] = &[
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];
const NODE_NAMESPACES: &[&str] = &["kubelet.kubernetes.io", "node.kubernetes.io"];

/// The errors of a name such as `example.com/MyName`.
pub(super) fn qualified(name: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let regex = || {
        format!(
            "must {CHARACTERS} (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '{QUALIFIED}')"
        )
    };
    let last = match name.split('/').collect::<Vec<_>>().as_slice() {
        [last] => *last,
        [prefix, last] => {
            if prefix.is_empty() {
                wrong.push("prefix part must be non-empty".to_owned());
            } else if !is_subdomain(prefix) {
                let must = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character";
                wrong.push(format!(
                    "prefix part {must} (e.g. 'example.com', regex used for validation is '{SUBDOMAIN}')"
                ));
            }
            last
        }
        _ => {
            let form = "with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')";
            return vec![format!("a qualified name {} {form}", regex())];
        }
    };
    if last.is_empty() {
        wrong.push("name part must be non-empty".to_owned());
    } else if last.len() > 63 {
        wrong.push("name part must be no more than 63 characters".to_owned());
    }
    if !is_word(last) {
        wrong.push(format!("name part {}", regex()));
    }
    wrong
}

/// The errors of a label's value.
pub(super) fn label_value(value: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    if value.len() > 63 {
        wrong.push("must be no more than 63 characters".to_owned());
    }
    if !value.is_empty() && !is_word(value) {
        wrong.push(format!(
            "a valid label must be an empty string or {CHARACTERS} (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '({QUALIFIED})?')"
        ));
    }
    wrong
}

pub(super) fn is_huge_page(resource: &str) -> bool {
    resource.starts_with("hugepages-")
}

/// The errors of the labels a node registers with.
pub fn node_labels(labels: &BTreeMap<String, String>) -> Vec<String> {
    let mut found = Vec::new();
    let unknown: Vec<&str> = labels.keys().map(String::as_str).filter(|key| is_reserved(key)).collect();
    if !unknown.is_empty() {
        found.push(format!(
            "unknown 'kubernetes.io' or 'k8s.io' labels specified with --node-labels: [{}]\n--node-labels in the 'kubernetes.io' namespace must begin with an allowed prefix ({}) or be in the specifically allowed set ({})",
            unknown.join(" "),
            NODE_NAMESPACES.join(", "),
            NODE_LABELS.join(", ")
        ));
    }
    for (key, value) in labels {
        for (text, wrong) in [(key, qualified(key)), (value, label_value(value))] {
            if !wrong.is_empty() {
                found.push(format!("invalid node labels: '{text}' - {}", wrong.join(", ")));
            }
        }
    }
    found
}

fn is_reserved(key: &str) -> bool {
    let namespace = key.split_once('/').map_or("", |(namespace, _)| namespace);
    let within = |of: &str| namespace == of || namespace.strip_suffix(of).is_some_and(|rest| rest.ends_with('.'));
    (within("kubernetes.io") || within("k8s.io"))
        && !NODE_LABELS.contains(&key)
        && !NODE_NAMESPACES.iter().any(|allowed| within(allowed))
}

fn is_word(text: &str) -> bool {
    let ends = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let inner = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    inner && ends(text.bytes().next()) && ends(text.bytes().last())
}

fn is_subdomain(text: &str) -> bool {
    let is_label = |label: &str| {
        let inner = label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
        !label.is_empty() && inner && !label.starts_with('-') && !label.ends_with('-')
    };
    text.len() <= 253 && text.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_may_not_claim_kubernetes_own_labels() {
        let refused = |pairs: &[(&str, &str)]| {
            node_labels(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()).join("\n")
        };
        assert_eq!(
            refused(&[("a", "b"), ("example.com/x", ""), ("node.kubernetes.io/x", "y"), ("kubernetes.io/arch", "z")]),
            ""
        );
        insta::assert_snapshot!(refused(&[("node-role.kubernetes.io/master", ""), ("x.k8s.io/y", ""), ("notk8s.io/y", "")]), @"
        unknown 'kubernetes.io' or 'k8s.io' labels specified with --node-labels: [node-role.kubernetes.io/master x.k8s.io/y]
        --node-labels in the 'kubernetes.io' namespace must begin with an allowed prefix (kubelet.kubernetes.io, node.kubernetes.io) or be in the specifically allowed set (beta.kubernetes.io/arch, beta.kubernetes.io/instance-type, beta.kubernetes.io/os, failure-domain.beta.kubernetes.io/region, failure-domain.beta.kubernetes.io/zone, kubernetes.io/arch, kubernetes.io/hostname, kubernetes.io/os, node.kubernetes.io/instance-type, topology.kubernetes.io/region, topology.kubernetes.io/zone)
        ");
        insta::assert_snapshot!(refused(&[("-a", "b c"), ("a/b/c", ""), ("A.b/c", "")]), @r"
        invalid node labels: '-a' - name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')
        invalid node labels: 'b c' - a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')
        invalid node labels: 'A.b/c' - prefix part a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
        invalid node labels: 'a/b/c' - a qualified name must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')
        ");
    }
}
