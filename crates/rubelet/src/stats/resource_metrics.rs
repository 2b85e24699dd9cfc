//! `/metrics/resource`: CPU, memory and swap of the node, its pods and their containers; metrics-server reads it.
//!
//! Owns: its names and labels. metrics-server computes rates itself, from two scrapes and `container_start_time_seconds`.
//! Upstream: `pkg/kubelet/metrics/collectors/resource_metrics.go`.

use super::{
    exposition::{Exposition, Labels},
    sample::{ContainerSample, PodSample, Sample, SampleError},
};

pub(crate) fn exposition(sample: Result<&Sample, &SampleError>) -> Exposition {
    let mut exposition = Exposition::default();
    if let Ok(sample) = sample {
        containers(&mut exposition, sample);
        node(&mut exposition, sample);
        pods(&mut exposition, sample);
    }
    let help = "[STABLE] 1 if there was an error while getting container metrics, 0 otherwise";
    let failed = u8::from(sample.is_err());
    exposition.gauge("resource_scrape_error", help).add(&Labels::default(), failed, None);
    exposition
}

fn containers(exposition: &mut Exposition, sample: &Sample) {
    let at = Some(sample.at);
    let labelled: Vec<(Labels, &ContainerSample)> = sample
        .pods
        .iter()
        .flat_map(|pod| pod.containers.iter().map(move |container| (container_labels(pod, container), container)))
        .collect();
    let help = "[STABLE] Cumulative cpu time consumed by the container in core-seconds";
    let mut family = exposition.counter("container_cpu_usage_seconds_total", help);
    for (labels, container) in &labelled {
        if let Some(cpu) = &container.measured.stats.cpu {
            family.add(labels, seconds(cpu.usage_nanos), at);
        }
    }
    let help = "[STABLE] Current working set of the container in bytes";
    let mut family = exposition.gauge("container_memory_working_set_bytes", help);
    for (labels, container) in &labelled {
        if let Some(memory) = &container.measured.stats.memory {
            family.add(labels, memory.working_set_bytes, at);
        }
    }
    let help = "[STABLE] Start time of the container since unix epoch in seconds";
    let mut family = exposition.gauge("container_start_time_seconds", help);
    for (labels, container) in &labelled {
        family.add(labels, container.target.created.as_nanosecond() as f64 / 1e9, None);
    }
    let help = "[ALPHA] Current amount of the container swap limit in bytes. Reported only on non-windows systems";
    let mut family = exposition.gauge("container_swap_limit_bytes", help);
    for (labels, container) in &labelled {
        if let Some(limit) = container.measured.stats.memory.as_ref().and_then(|memory| memory.swap_limit_bytes) {
            family.add(labels, limit, at);
        }
    }
    let help = "[ALPHA] Current amount of the container swap usage in bytes. Reported only on non-windows systems";
    let mut family = exposition.gauge("container_swap_usage_bytes", help);
    for (labels, container) in &labelled {
        if let Some(memory) = &container.measured.stats.memory {
            family.add(labels, memory.swap_bytes, at);
        }
    }
}

fn node(exposition: &mut Exposition, sample: &Sample) {
    let (at, none) = (Some(sample.at), Labels::default());
    let stats = sample.root.as_ref().map(|root| &root.stats);
    if let Some(cpu) = stats.and_then(|stats| stats.cpu.as_ref()) {
        let help = "[STABLE] Cumulative cpu time consumed by the node in core-seconds";
        exposition.counter("node_cpu_usage_seconds_total", help).add(&none, seconds(cpu.usage_nanos), at);
    }
    if let Some(memory) = stats.and_then(|stats| stats.memory.as_ref()) {
        let help = "[STABLE] Current working set of the node in bytes";
        exposition.gauge("node_memory_working_set_bytes", help).add(&none, memory.working_set_bytes, at);
    }
    let help = "[ALPHA] Current swap usage of the node in bytes. Reported only on non-windows systems";
    exposition.gauge("node_swap_usage_bytes", help).add(&none, sample.machine.swap_used_bytes(), at);
}

fn pods(exposition: &mut Exposition, sample: &Sample) {
    let at = Some(sample.at);
    let measured = sample.pods.iter().filter_map(|pod| Some((pod_labels(pod), &pod.own.as_ref()?.stats)));
    let labelled: Vec<_> = measured.collect();
    let help = "[STABLE] Cumulative cpu time consumed by the pod in core-seconds";
    let mut family = exposition.counter("pod_cpu_usage_seconds_total", help);
    for (labels, stats) in &labelled {
        if let Some(cpu) = &stats.cpu {
            family.add(labels, seconds(cpu.usage_nanos), at);
        }
    }
    let help = "[STABLE] Current working set of the pod in bytes";
    let mut family = exposition.gauge("pod_memory_working_set_bytes", help);
    for (labels, stats) in &labelled {
        if let Some(memory) = &stats.memory {
            family.add(labels, memory.working_set_bytes, at);
        }
    }
    let help = "[ALPHA] Current amount of the pod swap usage in bytes. Reported only on non-windows systems";
    let mut family = exposition.gauge("pod_swap_usage_bytes", help);
    for (labels, stats) in &labelled {
        if let Some(memory) = &stats.memory {
            family.add(labels, memory.swap_bytes, at);
        }
    }
}

fn pod_labels(pod: &PodSample) -> Labels {
    Labels::new([("namespace", pod.target.namespace.as_str()), ("pod", &pod.target.name)])
}

fn container_labels(pod: &PodSample, container: &ContainerSample) -> Labels {
    Labels::new([
        ("container", container.target.name.as_str()),
        ("namespace", &pod.target.namespace),
        ("pod", &pod.target.name),
    ])
}

pub(crate) fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::stats::example;

    #[test]
    fn names_labels_and_units_are_upstreams() {
        assert_snapshot!(exposition(Ok(&example::sample())).into_text());
    }

    #[test]
    fn without_figures_there_is_an_error_to_be_seen() {
        let text = exposition(Err(&SampleError::TooSlow)).into_text();
        assert!(text.ends_with("\nresource_scrape_error 1\n") && text.lines().count() == 3, "{text}");
    }
}
