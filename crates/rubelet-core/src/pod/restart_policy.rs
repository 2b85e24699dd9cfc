//! Whether a container restarts after it exited.
//!
//! Owns: a container's restart rules, its own restart policy, and the pod's. Never: when; that is `restart.rs`.
//! Upstream: `podutil.ContainerShouldRestart`, `kubecontainer.ShouldContainerBeRestarted`.

use k8s_openapi::api::core::v1::{Container, PodSpec};

/// The container's first matching rule, else its own policy, else the pod's; a pod without one restarts always.
pub fn restarts_after(container: &Container, spec: &PodSpec, exit_code: i32) -> bool {
    let own_policy = container.restart_policy.as_deref();
    if own_policy.is_some() && has_matching_rule(container, exit_code) {
        return true;
    }
    match own_policy.or(spec.restart_policy.as_deref()) {
        Some("OnFailure") => exit_code != 0,
        Some("Never") => false,
        Some(_) | None => true,
    }
}

/// A container stopped by a probe restarts whatever its exit code, unless the policy is Never.
pub fn restarts_after_probe(container: &Container, spec: &PodSpec) -> bool {
    container.restart_policy.as_deref().or(spec.restart_policy.as_deref()) != Some("Never")
}

/// A sidecar: an init container that is kept running beside the containers after it.
pub fn is_sidecar(init_container: &Container) -> bool {
    init_container.restart_policy.as_deref() == Some("Always")
}

/// Every action a rule can have restarts the container, alone or with all others.
fn has_matching_rule(container: &Container, exit_code: i32) -> bool {
    container.restart_policy_rules.iter().flatten().any(|rule| {
        let acts = matches!(rule.action.as_str(), "Restart" | "RestartAllContainers");
        let matched = rule.exit_codes.as_ref().is_some_and(|codes| {
            let listed = codes.values.iter().flatten().any(|code| *code == exit_code);
            match codes.operator.as_str() {
                "In" => listed,
                "NotIn" => !listed,
                _ => false,
            }
        });
        acts && matched
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ContainerRestartRule, ContainerRestartRuleOnExitCodes};

    use super::*;

    #[test]
    fn policies_decide_from_the_inside_out() {
        for (pod, own, exit_code, restarts) in [
            (None, None, 0, true),
            (Some("Always"), None, 0, true),
            (Some("OnFailure"), None, 0, false),
            (Some("OnFailure"), None, 1, true),
            (Some("Never"), None, 1, false),
            (Some("Never"), Some("Always"), 0, true),
            (Some("Never"), Some("OnFailure"), 1, true),
            (Some("Always"), Some("Never"), 1, false),
        ] {
            let spec = PodSpec { restart_policy: pod.map(str::to_owned), ..PodSpec::default() };
            let container = Container { restart_policy: own.map(str::to_owned), ..Container::default() };
            assert_eq!(restarts_after(&container, &spec, exit_code), restarts, "{pod:?} {own:?} {exit_code}");
        }
    }

    #[test]
    fn a_rule_for_the_exit_code_comes_before_every_policy() {
        let rule = |operator: &str| ContainerRestartRule {
            action: "Restart".to_owned(),
            exit_codes: Some(ContainerRestartRuleOnExitCodes { operator: operator.to_owned(), values: Some(vec![42]) }),
        };
        let container = |operator| Container {
            restart_policy: Some("Never".to_owned()),
            restart_policy_rules: Some(vec![rule(operator)]),
            ..Container::default()
        };
        let spec = PodSpec { restart_policy: Some("Never".to_owned()), ..PodSpec::default() };
        assert!(restarts_after(&container("In"), &spec, 42));
        assert!(!restarts_after(&container("In"), &spec, 41));
        assert!(!restarts_after(&container("NotIn"), &spec, 42));
        assert!(restarts_after(&container("NotIn"), &spec, 41));
    }
}
