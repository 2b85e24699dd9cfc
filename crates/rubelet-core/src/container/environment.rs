//! What does a container find in its environment, and in `$(NAME)`?
//!
//! Owns: env values, field and resource references, the expansion of references. Never: asks the API server; values that
//! need it are refused with upstream's words for a kubelet without one.
//! Upstream: `makeEnvironmentVariables`, `third_party/forked/golang/expansion`, `pkg/fieldpath`, `pkg/api/v1/resource`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, EnvFromSource, EnvVarSource, ObjectFieldSelector, Pod, ResourceFieldSelector,
};

use super::{ConfigError, find};
use crate::{
    effect::StartContainer,
    id::{name_of, namespace_of},
    quantity::{Quantity, amount},
    settings::{Allocatable, Settings},
};

pub type Environment = BTreeMap<String, String>;

/// Everything the container declares; a name declared twice has its last value.
pub fn environment(
    order: &StartContainer,
    container: &Container,
    settings: &Settings,
) -> Result<Environment, ConfigError> {
    refuse_api_sources(&order.pod, container.env_from.as_deref().unwrap_or_default())?;
    let mut environment = Environment::new();
    for variable in container.env.iter().flatten() {
        let value = match (variable.value.as_deref(), &variable.value_from) {
            (Some(value), _) if !value.is_empty() => expand(value, &environment),
            (_, Some(source)) => resolve(source, order, container, settings)?,
            (_, None) => String::new(),
        };
        environment.insert(variable.name.clone(), value);
    }
    Ok(environment)
}

/// Replaces `$(NAME)` by its value; `$$` is a dollar, and what names nothing stays as it is.
pub fn expand(text: &str, environment: &Environment) -> String {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        expanded.push_str(&rest[..dollar]);
        let after = &rest[dollar + 1..];
        if let Some(escaped) = after.strip_prefix('$') {
            expanded.push('$');
            rest = escaped;
            continue;
        }
        match after.strip_prefix('(').and_then(|reference| reference.split_once(')')) {
            Some((name, tail)) => {
                match environment.get(name) {
                    Some(value) => expanded.push_str(value),
                    None => {
                        expanded.push_str("$(");
                        expanded.push_str(name);
                        expanded.push(')');
                    }
                }
                rest = tail;
            }
            None => {
                expanded.push('$');
                rest = after;
            }
        }
    }
    expanded.push_str(rest);
    expanded
}

fn refuse_api_sources(pod: &Pod, sources: &[EnvFromSource]) -> Result<(), ConfigError> {
    for source in sources {
        if let Some(config_map) = &source.config_map_ref {
            return Err(needs_api("configMap", pod, &config_map.name));
        }
        if let Some(secret) = &source.secret_ref {
            return Err(needs_api("secret", pod, &secret.name));
        }
    }
    Ok(())
}

fn resolve(
    source: &EnvVarSource,
    order: &StartContainer,
    container: &Container,
    settings: &Settings,
) -> Result<String, ConfigError> {
    let pod = &order.pod;
    if let Some(field) = &source.field_ref {
        field_value(field, order, settings)
    } else if let Some(field) = &source.resource_field_ref {
        let of = match field.container_name.as_deref() {
            None | Some("") => container,
            Some(other) => find(pod, other).map_err(|_| ConfigError(format!("container {other} not found")))?,
        };
        resource_value(field, of, settings.node.allocatable)
    } else if let Some(key) = &source.config_map_key_ref {
        Err(needs_api("configMap", pod, &key.name))
    } else if let Some(key) = &source.secret_key_ref {
        Err(needs_api("secret", pod, &key.name))
    } else if let Some(key) = &source.file_key_ref {
        Err(ConfigError(format!("cannot find the volume {:?} referenced by FileKeyRef", key.volume_name)))
    } else {
        Ok(String::new())
    }
}

fn needs_api(kind: &str, pod: &Pod, name: &str) -> ConfigError {
    ConfigError(format!("couldn't get {kind} {}/{name}, no kubeClient defined", namespace_of(pod)))
}

fn field_value(
    field: &ObjectFieldSelector,
    order: &StartContainer,
    settings: &Settings,
) -> Result<String, ConfigError> {
    let (pod, spec) = (&order.pod, order.pod.spec.as_ref());
    let (annotations, labels) = (&pod.metadata.annotations, &pod.metadata.labels);
    if let Some((path, key)) = subscripted(&field.field_path) {
        let map = match path {
            "metadata.annotations" => annotations,
            "metadata.labels" => labels,
            _ => return Err(ConfigError(format!("fieldPath {:?} does not support subscript", field.field_path))),
        };
        return Ok(map.as_ref().and_then(|map| map.get(key)).cloned().unwrap_or_default());
    }
    Ok(match field.field_path.as_str() {
        "metadata.name" => name_of(pod).to_owned(),
        "metadata.namespace" => namespace_of(pod).to_owned(),
        "metadata.uid" => order.uid.as_str().to_owned(),
        "metadata.annotations" => quoted_lines(annotations.as_ref()),
        "metadata.labels" => quoted_lines(labels.as_ref()),
        "spec.nodeName" => spec
            .and_then(|spec| spec.node_name.clone())
            .filter(|node| !node.is_empty())
            .unwrap_or_else(|| settings.node_name.clone()),
        "spec.serviceAccountName" => spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default(),
        "status.hostIP" => settings.host_ips.first().cloned().unwrap_or_default(),
        "status.hostIPs" => settings.host_ips.join(","),
        "status.podIP" => pod_ips(order, settings).first().cloned().unwrap_or_default(),
        "status.podIPs" => pod_ips(order, settings).join(","),
        other => return Err(ConfigError(format!("unsupported fieldPath: {other}"))),
    })
}

/// A pod on the host's network has the host's addresses.
fn pod_ips<'a>(order: &'a StartContainer, settings: &'a Settings) -> &'a [String] {
    let is_host_network = order.pod.spec.as_ref().is_some_and(super::is_host_network);
    if order.pod_ips.is_empty() && is_host_network { &settings.host_ips } else { &order.pod_ips }
}

/// `metadata.labels['key']` as path and key.
fn subscripted(path: &str) -> Option<(&str, &str)> {
    path.strip_suffix("']")?.split_once("['").filter(|(path, _)| !path.is_empty())
}

/// One `key="value"` per line, sorted, quoted as Go quotes.
fn quoted_lines(map: Option<&BTreeMap<String, String>>) -> String {
    let lines: Vec<String> =
        map.into_iter().flatten().map(|(key, value)| format!("{key}={}", go_quoted(value))).collect();
    lines.join("\n")
}

/// `strconv.Quote` for text that is valid UTF-8.
pub fn go_quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\u{7}' => quoted.push_str("\\a"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{c}' => quoted.push_str("\\f"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\u{b}' => quoted.push_str("\\v"),
            control if control < ' ' || control == '\u{7f}' => {
                quoted.push_str(&format!("\\x{:02x}", u32::from(control)));
            }
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

/// Rounded up to whole divisors. A limit that is not set is what the node has to give.
fn resource_value(
    field: &ResourceFieldSelector,
    container: &Container,
    allocatable: Allocatable,
) -> Result<String, ConfigError> {
    let unsupported = || ConfigError(format!("unsupported container resource : {}", field.resource));
    let (kind, resource) = field.resource.split_once('.').ok_or_else(unsupported)?;
    let is_huge_pages = resource.starts_with("hugepages-");
    if !matches!(resource, "cpu" | "memory" | "ephemeral-storage") && !is_huge_pages {
        return Err(unsupported());
    }
    let resources = container.resources.as_ref();
    let quantity = match kind {
        "requests" => amount(resources.and_then(|resources| resources.requests.as_ref()), resource),
        "limits" => match amount(resources.and_then(|resources| resources.limits.as_ref()), resource) {
            limit if limit.is_zero() && !is_huge_pages => allocatable_amount(allocatable, resource),
            limit => limit,
        },
        _ => return Err(unsupported()),
    };
    let divisor = match &field.divisor {
        None => Quantity::ZERO,
        Some(divisor) => Quantity::parse(&divisor.0).map_err(|error| ConfigError(error.to_string()))?,
    };
    let divisor = if divisor.is_zero() { Quantity::from_units(1) } else { divisor };
    let (amount, step) = match resource {
        "cpu" => (quantity.millis(), divisor.millis()),
        _ => (quantity.value(), divisor.value()),
    };
    Ok((amount.saturating_add(step - 1) / step.max(1)).to_string())
}

fn allocatable_amount(allocatable: Allocatable, resource: &str) -> Quantity {
    match resource {
        "cpu" => Quantity::from_millis(allocatable.cpu_millis),
        "memory" => Quantity::from_units(allocatable.memory_bytes),
        _ => Quantity::from_units(allocatable.ephemeral_storage_bytes),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::effect::ImageFacts;

    #[test]
    fn references_expand_as_upstream_expands_them() {
        let environment = Environment::from([("A".to_owned(), "1".to_owned()), ("E".to_owned(), String::new())]);
        for (text, expected) in [
            ("$(A)", "1"),
            ("x$(A)y$(A)", "x1y1"),
            ("$(B)", "$(B)"),
            ("$(E)|", "|"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$$$$(A)", "$$(A)"),
            ("$(A", "$(A"),
            ("$A", "$A"),
            ("$", "$"),
            ("a$", "a$"),
            ("$()", "$()"),
            ("$($(A))", "$($(A))"),
            ("$é$(A)", "$é1"),
            ("$$", "$"),
        ] {
            assert_eq!(expand(text, &environment), expected, "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn doubled_dollars_protect_any_text(text in ".*") {
            let environment = Environment::from([("A".to_owned(), "1".to_owned())]);
            proptest::prop_assert_eq!(expand(&text.replace('$', "$$"), &environment), text);
        }

        #[test]
        fn text_without_known_names_keeps_everything_but_doubled_dollars(text in "[a-z$()A ]{0,20}") {
            proptest::prop_assume!(!text.contains("$$"));
            proptest::prop_assert_eq!(expand(&text, &Environment::new()), text);
        }
    }

    fn order(container: &str) -> StartContainer {
        let pod: Pod = serde_json::from_str(&format!(
            r#"{{"metadata":{{"name":"web","namespace":"prod","labels":{{"app":"x","t":"a\"b"}},"annotations":{{"k":"v"}}}},
                "spec":{{"serviceAccountName":"sa","containers":[{container}]}}}}"#
        ))
        .unwrap();
        StartContainer {
            uid: "u-1".into(),
            pod: Arc::new(pod),
            container: "c".to_owned(),
            attempt: 0,
            sandbox: "s".into(),
            sandbox_attempt: 0,
            pod_ips: vec!["10.0.0.5".to_owned(), "fd00::5".to_owned()],
            image: ImageFacts::default(),
        }
    }

    fn resolved(container: &str) -> Result<String, ConfigError> {
        let order = order(container);
        let mut settings = Settings::for_node("node-1");
        settings.host_ips = vec!["192.0.2.1".to_owned()];
        settings.node.allocatable = Allocatable { cpu_millis: 1900, memory_bytes: 1 << 30, ephemeral_storage_bytes: 0 };
        let environment = environment(&order, &order.pod.spec.as_ref().unwrap().containers[0], &settings)?;
        let lines: Vec<String> = environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
        Ok(lines.join(" "))
    }

    fn field(path: &str) -> Result<String, ConfigError> {
        resolved(&format!(
            r#"{{"name":"c","env":[{{"name":"V","valueFrom":{{"fieldRef":{{"fieldPath":"{path}"}}}}}}]}}"#
        ))
    }

    fn resource(resource: &str, divisor: &str) -> Result<String, ConfigError> {
        resolved(&format!(
            r#"{{"name":"c","resources":{{"requests":{{"cpu":"250m","memory":"100Mi"}},"limits":{{"memory":"200Mi"}}}},
                "env":[{{"name":"V","valueFrom":{{"resourceFieldRef":{{"resource":"{resource}","divisor":"{divisor}"}}}}}}]}}"#
        ))
    }

    #[test]
    fn fields_of_the_pod_are_known_without_an_api_server() {
        for (path, value) in [
            ("metadata.name", "web"),
            ("metadata.namespace", "prod"),
            ("metadata.uid", "u-1"),
            ("metadata.labels", "app=\"x\"\nt=\"a\\\"b\""),
            ("metadata.labels['app']", "x"),
            ("metadata.annotations['none']", ""),
            ("spec.nodeName", "node-1"),
            ("spec.serviceAccountName", "sa"),
            ("status.hostIP", "192.0.2.1"),
            ("status.podIP", "10.0.0.5"),
            ("status.podIPs", "10.0.0.5,fd00::5"),
        ] {
            assert_eq!(field(path), Ok(format!("V={value}")), "{path}");
        }
        assert_eq!(field("spec.hostname"), Err(ConfigError("unsupported fieldPath: spec.hostname".to_owned())));
    }

    #[test]
    fn resources_are_rounded_up_to_the_divisor() {
        for (name, divisor, value) in [
            ("requests.cpu", "0", "1"),
            ("requests.cpu", "1m", "250"),
            ("limits.cpu", "1m", "1900"),
            ("limits.cpu", "0", "2"),
            ("requests.memory", "1Mi", "100"),
            ("limits.memory", "1Gi", "1"),
            ("limits.memory", "0", "209715200"),
        ] {
            assert_eq!(resource(name, divisor), Ok(format!("V={value}")), "{name} {divisor}");
        }
        assert!(resource("limits.gpu", "0").is_err());
    }

    #[test]
    fn later_variables_see_earlier_ones_and_the_last_of_a_name_wins() {
        let container = r#"{"name":"c","env":[{"name":"A","value":"1"},{"name":"B","value":"$(A)-$(Z)"},{"name":"A","value":"2"},{"name":"Z"}]}"#;
        assert_eq!(resolved(container), Ok("A=2 B=1-$(Z) Z=".to_owned()));
    }

    #[test]
    fn what_needs_the_api_server_is_refused_in_upstreams_words() {
        let container = r#"{"name":"c","env":[{"name":"A","valueFrom":{"secretKeyRef":{"name":"s","key":"k"}}}]}"#;
        assert_eq!(resolved(container).unwrap_err().0, "couldn't get secret prod/s, no kubeClient defined");
        let container = r#"{"name":"c","envFrom":[{"configMapRef":{"name":"m"}}]}"#;
        assert_eq!(resolved(container).unwrap_err().0, "couldn't get configMap prod/m, no kubeClient defined");
    }
}
