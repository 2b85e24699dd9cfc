//! Topology of migrated persistent volumes: zone and region labels become the topology keys of the CSI driver.
//!
//! Owns: the keys of drivers, and the node affinity made of them.
//! Upstream: `translateTopologyFromInTreeToCSI` of `csi-translation-lib`.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume};

/// The labels of a zone and of its region, the present ones first.
const LABELS: [(&str, &str); 2] = [
    ("topology.kubernetes.io/zone", REGION),
    ("failure-domain.beta.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/region"),
];
const REGION: &str = "topology.kubernetes.io/region";
/// Between the zones of a disk that is in several.
pub const ZONE_DELIMITER: &str = "__";

/// A driver's topology keys.
#[derive(Debug)]
pub struct Keys {
    pub zone: &'static str,
    /// `None`: a region keeps its label, and a zone's label may name several.
    pub region: Option<&'static str>,
}

/// Those that the affinity names, else those that the volume has.
fn labels_of(volume: &PersistentVolume) -> (&'static str, &'static str) {
    let of_affinity = LABELS.into_iter().find(|(zone, _)| requirements(volume).any(|it| it.key == *zone));
    let labels = volume.metadata.labels.as_ref();
    let of_volume = || LABELS.into_iter().find(|(zone, _)| labels.is_some_and(|labels| labels.contains_key(*zone)));
    of_affinity.or_else(of_volume).unwrap_or(LABELS[0])
}

/// Says the places of a volume's affinity, else those of its labels, with the driver's keys.
pub fn translate(volume: &mut PersistentVolume, keys: &Keys) {
    let (zone, region) = labels_of(volume);
    match keys.region {
        Some(region_key) => {
            let label = |key: &str| volume.metadata.labels.as_ref()?.get(key).cloned();
            let (of_zone, of_region) = (label(zone), label(region));
            replace_or_add(volume, zone, keys.zone, of_zone.as_slice());
            replace_or_add(volume, region, region_key, of_region.as_slice());
        }
        None => {
            let label = volume.metadata.labels.as_ref().and_then(|labels| labels.get(zone));
            let zones: Option<Vec<_>> = label.map(|zones| zones.split(ZONE_DELIMITER).map(str::to_owned).collect());
            replace_or_add(volume, zone, keys.zone, &zones.unwrap_or_default());
            replace(volume, region, REGION);
        }
    }
}

fn replace_or_add(volume: &mut PersistentVolume, key: &str, with: &str, places: &[String]) {
    let has_places =
        |it: &NodeSelectorRequirement| it.key == key && it.values.as_ref().is_some_and(|it| !it.is_empty());
    if requirements(volume).any(has_places) {
        replace(volume, key, with);
        return;
    }
    let places: BTreeSet<_> = places.iter().map(|place| place.trim()).filter(|place| !place.is_empty()).collect();
    if places.is_empty() {
        return;
    }
    let requirement = NodeSelectorRequirement {
        key: with.to_owned(),
        operator: "In".to_owned(),
        values: Some(places.into_iter().map(str::to_owned).collect()),
    };
    let spec = volume.spec.get_or_insert_default();
    let terms = &mut spec.node_affinity.get_or_insert_default().required.get_or_insert_default().node_selector_terms;
    if terms.is_empty() {
        terms.push(NodeSelectorTerm::default());
    }
    for term in terms {
        term.match_expressions.get_or_insert_default().push(requirement.clone());
    }
}

fn replace(volume: &mut PersistentVolume, key: &str, with: &str) {
    let affinity = volume.spec.as_mut().and_then(|spec| spec.node_affinity.as_mut());
    let Some(required) = affinity.and_then(|affinity| affinity.required.as_mut()) else { return };
    let terms = required.node_selector_terms.iter_mut();
    for requirement in terms.filter_map(|term| term.match_expressions.as_mut()).flatten().filter(|it| it.key == key) {
        with.clone_into(&mut requirement.key);
    }
}

fn requirements(volume: &PersistentVolume) -> impl Iterator<Item = &NodeSelectorRequirement> {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let required = affinity.and_then(|affinity| affinity.required.as_ref());
    let terms = required.into_iter().flat_map(|required| &required.node_selector_terms);
    terms.filter_map(|term| term.match_expressions.as_ref()).flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const DISKS: Keys = Keys { zone: "disks/zone", region: None };
    const MACHINES: Keys = Keys { zone: "machines/zone", region: Some("machines/region") };

    /// Its terms, a line each.
    fn translated(labels: &Value, terms: &Value, keys: &Keys) -> String {
        let spec = json!({"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}});
        let volume = json!({"metadata": {"name": "pv", "labels": labels}, "spec": spec});
        let mut volume: PersistentVolume = serde_json::from_value(volume).unwrap();
        translate(&mut volume, keys);
        let terms = volume.spec.unwrap().node_affinity.unwrap().required.unwrap().node_selector_terms;
        let shown = |it: NodeSelectorRequirement| format!("{} {} {:?}", it.key, it.operator, it.values.unwrap());
        let line = |term: NodeSelectorTerm| {
            term.match_expressions.into_iter().flatten().map(shown).collect::<Vec<_>>().join(", ")
        };
        terms.into_iter().map(line).collect::<Vec<_>>().join("\n")
    }

    fn within(places: &[(&str, &str)]) -> Value {
        let one = |(key, value): &(&str, &str)| json!({"key": key, "operator": "In", "values": [value]});
        json!({"matchExpressions": places.iter().map(one).collect::<Vec<_>>()})
    }

    #[test]
    fn places_are_said_with_the_drivers_keys() {
        let [(zone, region), (old_zone, old_region)] = LABELS;
        let both = json!({zone: "a1", region: "a"});
        let cases = [
            ("of the affinity", json!({}), json!([within(&[(zone, "a1"), ("rack", "3")])]), &DISKS),
            ("old labels", json!({}), json!([within(&[(old_zone, "a1"), (old_region, "a")])]), &DISKS),
            ("of the labels", json!({zone: "a2__a1__a1"}), json!([within(&[("rack", "3")]), within(&[])]), &DISKS),
            ("of old labels, no terms", json!({old_zone: "a1"}), json!([]), &DISKS),
            ("label without a zone", json!({zone: " "}), json!([]), &DISKS),
            ("the affinity counts more", both.clone(), json!([within(&[(zone, "a9")])]), &DISKS),
            ("nothing", json!({}), json!([within(&[("rack", "3")])]), &DISKS),
            ("zone and region", json!({}), json!([within(&[(zone, "a1"), (region, "a")])]), &MACHINES),
            ("zone and region of labels", both, json!([]), &MACHINES),
            ("several zones are one", json!({zone: "a__b"}), json!([]), &MACHINES),
        ];
        let lines = cases.map(|(what, labels, terms, keys)| {
            format!("{what}: {}", translated(&labels, &terms, keys)).trim_end().to_owned()
        });
        insta::assert_snapshot!(lines.join("\n"), @r#"
        of the affinity: disks/zone In ["a1"], rack In ["3"]
        old labels: disks/zone In ["a1"], topology.kubernetes.io/region In ["a"]
        of the labels: rack In ["3"], disks/zone In ["a1", "a2"]
        disks/zone In ["a1", "a2"]
        of old labels, no terms: disks/zone In ["a1"]
        label without a zone:
        the affinity counts more: disks/zone In ["a9"]
        nothing: rack In ["3"]
        zone and region: machines/zone In ["a1"], machines/region In ["a"]
        zone and region of labels: machines/zone In ["a1"], machines/region In ["a"]
        several zones are one: machines/zone In ["a__b"]
        "#);
    }
}
