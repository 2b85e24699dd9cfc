//! The licences of everything that becomes part of the program, by what `deny.toml` allows.
//!
//! Owns: reading the expressions that packages declare. `cargo deny`, where it is installed, also reads their licence texts, and knows advisories.

use std::{collections::BTreeSet, path::Path, time::Duration};

use anyhow::{Context as _, bail};
use rubelet_testbed::{command::capture, project};

pub fn run(root: &Path) -> anyhow::Result<()> {
    let deny = std::fs::read_to_string(root.join("deny.toml")).context("read deny.toml")?;
    let allowed = allowed(&deny);
    let tree = "tree --workspace --locked --edges=normal,build --prefix=none --format={p}|{l}";
    // On a fresh machine it downloads the packages first.
    let out = capture(project::cargo(tree.split(' ')).current_dir(root), Duration::from_secs(600))?;
    if !out.success {
        bail!("`cargo tree` failed:\n{}", out.stderr);
    }
    let packages: BTreeSet<&str> = out.stdout.lines().filter(|line| !line.is_empty()).collect();
    let refused: Vec<&str> = packages.into_iter().filter(|package| !is_package_allowed(package, &allowed)).collect();
    if !refused.is_empty() {
        bail!("{} packages have a licence that deny.toml does not allow:\n{}", refused.len(), refused.join("\n"));
    }
    Ok(())
}

/// `name v1.2.3|licence`, for one that was shown before with a mark at the end.
fn is_package_allowed(package: &str, allowed: &[&str]) -> bool {
    let package = package.trim_end_matches(" (*)");
    package.split_once('|').is_some_and(|(_, expression)| is_allowed(expression, allowed))
}

/// The list `allow` of the section `[licenses]`.
fn allowed(deny: &str) -> Vec<&str> {
    let section = deny.split("\n[").find_map(|section| section.strip_prefix("licenses]")).unwrap_or_default();
    let list = section.split_once("allow = [").and_then(|(_, rest)| rest.split_once(']')).map_or("", |(list, _)| list);
    list.split('"').skip(1).step_by(2).collect()
}

/// SPDX: `AND` binds closer than `OR`; a slash is an old `OR`.
fn is_allowed(expression: &str, allowed: &[&str]) -> bool {
    let expression = expression.replace('/', " OR ");
    if let (Some(open), Some(close)) = (expression.rfind('('), expression.find(')')) {
        // The innermost brackets first.
        let close = if close > open { close } else { open + expression[open..].find(')').unwrap_or(0) };
        let Some(inner) = expression.get(open + 1..close) else { return false };
        let value = if is_allowed(inner, allowed) { allowed.first().copied().unwrap_or_default() } else { "none" };
        return is_allowed(&format!("{}{value}{}", &expression[..open], &expression[close + 1..]), allowed);
    }
    expression.split(" OR ").any(|part| part.split(" AND ").all(|licence| allowed.contains(&licence.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_read_as_spdx() {
        let allowed = ["Apache-2.0", "MIT", "Apache-2.0 WITH LLVM-exception"];
        for expression in [
            "MIT",
            "MIT OR GPL-3.0",
            "MIT/GPL-3.0",
            "GPL-3.0 OR (MIT AND Apache-2.0)",
            "(GPL-3.0 OR MIT) AND (Apache-2.0 OR LGPL-2.1)",
            "Apache-2.0 WITH LLVM-exception OR GPL-3.0",
        ] {
            assert!(is_allowed(expression, &allowed), "{expression}");
        }
        for expression in ["GPL-3.0", "MIT AND GPL-3.0", "(MIT OR GPL-3.0) AND GPL-2.0", "MIT WITH exception", "(", ""]
        {
            assert!(!is_allowed(expression, &allowed), "{expression}");
        }
    }

    #[test]
    fn the_list_is_that_of_the_licences() {
        let deny =
            "[graph]\nallow = [\"x\"]\n[licenses]\n# a\nallow = [\n  \"MIT\",\n  \"ISC\",\n]\n[bans]\nallow = []\n";
        assert_eq!(allowed(deny), ["MIT", "ISC"]);
        assert!(is_package_allowed("a v1.0.0|MIT", &allowed(deny)));
        assert!(is_package_allowed("a v1.0.0 (proc-macro)|MIT (*)", &allowed(deny)));
        assert!(!is_package_allowed("a v1.0.0|GPL-3.0", &allowed(deny)));
        assert!(!is_package_allowed("a v1.0.0|", &allowed(deny)));
    }
}
