//! Finds the pod that a user names.
//!
//! Owns: names as users type them: in full, without the node name suffix, by UID, misspelled. Pure.

use std::sync::Arc;

use rubelet_core::{
    id::{PodUid, name_of, namespace_of},
    snapshot::{PodView, Snapshot},
};
use serde::{Deserialize, Serialize};

/// The user's input.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PodQuery<'a> {
    pub name: &'a str,
    /// `None`: in any namespace.
    pub namespace: Option<&'a str>,
}

/// Why no single pod matches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub(crate) enum NotFound {
    #[error("pods {wanted:?} not found{}", suggestions(similar))]
    Unknown { wanted: String, similar: Vec<String> },
    #[error("{wanted:?} matches {}; use -n NAMESPACE or the UID", candidates.join(", "))]
    Ambiguous { wanted: String, candidates: Vec<String> },
}

fn suggestions(similar: &[String]) -> String {
    if similar.is_empty() { String::new() } else { format!("; did you mean {}?", similar.join(" or ")) }
}

/// The pod with this UID, else this name, else this name with the node name suffix.
pub(crate) fn find<'a>(
    snapshot: &'a Snapshot,
    query: PodQuery<'_>,
) -> Result<(&'a PodUid, &'a Arc<PodView>), NotFound> {
    let in_namespace = |view: &PodView| query.namespace.is_none_or(|wanted| wanted == namespace_of(&view.pod));
    let static_name = format!("{}-{}", query.name, snapshot.node.name);
    type Reading<'a> = &'a dyn Fn(&PodUid, &PodView) -> bool;
    let readings: [Reading<'_>; 3] = [
        &|uid, _| uid.as_str() == query.name,
        &|_, view| name_of(&view.pod) == query.name && in_namespace(view),
        &|_, view| name_of(&view.pod) == static_name && in_namespace(view),
    ];
    for meant in readings {
        let mut found: Vec<_> = snapshot.pods.iter().filter(|(uid, view)| meant(uid, view)).collect();
        // A terminating pod does not make the name of its successor ambiguous.
        if found.len() > 1 && found.iter().any(|(_, view)| is_staying(view)) {
            found.retain(|(_, view)| is_staying(view));
        }
        match found.as_slice() {
            [] => continue,
            [only] => return Ok(*only),
            several => {
                let candidates = several.iter().map(|(uid, view)| format!("{} (UID {uid})", full_name(view))).collect();
                return Err(NotFound::Ambiguous { wanted: query.name.to_owned(), candidates });
            }
        }
    }
    Err(NotFound::Unknown { wanted: query.name.to_owned(), similar: similar(snapshot, query.name) })
}

fn is_staying(view: &PodView) -> bool {
    view.source.is_some() && matches!(view.lifecycle.as_str(), "Waiting" | "Syncing")
}

fn full_name(view: &PodView) -> String {
    format!("{}/{}", namespace_of(&view.pod), name_of(&view.pod))
}

/// At most three similar names, the closest first; also those in another namespace.
fn similar(snapshot: &Snapshot, typed: &str) -> Vec<String> {
    let suffix = format!("-{}", snapshot.node.name);
    let mut near: Vec<(usize, String)> = snapshot
        .pods
        .values()
        .filter_map(|view| {
            let short = name_of(&view.pod).strip_suffix(&suffix).unwrap_or(name_of(&view.pod));
            let distance = distance(typed, name_of(&view.pod)).min(distance(typed, short));
            let near = distance <= 2.min(typed.len() / 2) || (typed.len() >= 2 && name_of(&view.pod).contains(typed));
            near.then(|| (distance, full_name(view)))
        })
        .collect();
    near.sort();
    near.dedup();
    near.into_iter().take(3).map(|(_, name)| name).collect()
}

/// The edit distance, with transpositions.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    rows[0] = (0..=b.len()).collect();
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let changed = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = changed.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = least;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use serde_json::json;

    use super::super::tests::{snapshot, view};
    use super::{PodQuery, distance, find, full_name};

    #[test]
    fn people_find_pods_by_the_names_they_remember() {
        let pods = [
            ("u1", view("default", "web-n1", &["a"], &[], json!({}))),
            ("u2", view("default", "cache-n1", &["a"], &[], json!({}))),
            ("u3", view("kube-system", "cache-n1", &["a"], &[], json!({}))),
        ];
        let snapshot = snapshot("n1", pods);
        let cases = [
            ("web", None),
            ("web-n1", None),
            ("u3", None),
            ("cache", Some("kube-system")),
            ("cache", None),
            ("wbe", None),
            ("web", Some("kube-system")),
            ("database", None),
            ("", None),
        ];
        let answers: Vec<String> = cases
            .into_iter()
            .map(|(name, namespace)| match find(&snapshot, PodQuery { name, namespace }) {
                Ok((uid, view)) => format!("{name} {namespace:?} -> {uid} {}", full_name(view)),
                Err(error) => format!("{name} {namespace:?} -> {error}"),
            })
            .collect();
        assert_snapshot!(answers.join("\n"), @r#"
        web None -> u1 default/web-n1
        web-n1 None -> u1 default/web-n1
        u3 None -> u3 kube-system/cache-n1
        cache Some("kube-system") -> u3 kube-system/cache-n1
        cache None -> "cache" matches default/cache-n1 (UID u2), kube-system/cache-n1 (UID u3); use -n NAMESPACE or the UID
        wbe None -> pods "wbe" not found; did you mean default/web-n1?
        web Some("kube-system") -> pods "web" not found; did you mean default/web-n1?
        database None -> pods "database" not found
         None -> pods "" not found
        "#);
    }

    #[test]
    fn a_successor_takes_the_name_of_a_pod_on_its_way_out() {
        let mut leaving = view("default", "web-n1", &["a"], &[], json!({}));
        leaving.lifecycle = "Terminating".to_owned();
        let snapshot = snapshot("n1", [("old", leaving), ("new", view("default", "web-n1", &["a"], &[], json!({})))]);
        let (uid, _) = find(&snapshot, PodQuery { name: "web", namespace: None }).unwrap();
        assert_eq!(uid.as_str(), "new");
    }

    #[test]
    fn distance_counts_edits_and_swaps() {
        for (a, b, expected) in [("web", "web", 0), ("wbe", "web", 1), ("", "abc", 3), ("cache", "catche", 1)] {
            assert_eq!(distance(a, b), expected, "{a} {b}");
        }
    }
}
