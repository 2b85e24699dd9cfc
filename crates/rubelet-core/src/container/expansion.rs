//! Expansion of `$(NAME)`, and the size limits of a process's arguments.
//!
//! Owns: the expansion of references, and the kernel's limits for arguments and environment. Longer text could never be
//! executed, so it is rejected before it is built: a small pod cannot make the agent build gigabytes.
//! Upstream: `third_party/forked/golang/expansion`; it has no limits, and text that is too long fails in `execve`.

use super::ConfigError;

/// The limit of `execve` for arguments and environment together, whatever the stack limit: three quarters of 8 MiB.
pub const MAX_EXEC_BYTES: usize = 6 << 20;
/// `MAX_ARG_STRLEN`: the pages that one string may fill, the NUL at its end included.
const MAX_STRING_PAGES: usize = 32;
/// Each string needs a pointer, too.
const POINTER_BYTES: usize = size_of::<u64>();
const NUL_BYTES: usize = 1;
/// Names in messages are cut here: the name itself may be too long.
const MAX_SHOWN_NAME_BYTES: usize = 256;

/// The space left for a process's arguments and environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecSpace {
    max_string_bytes: usize,
    left_bytes: usize,
}

impl ExecSpace {
    pub fn new(page_bytes: usize) -> Self {
        let max_string_bytes = page_bytes.saturating_mul(MAX_STRING_PAGES).saturating_sub(NUL_BYTES);
        ExecSpace { max_string_bytes, left_bytes: MAX_EXEC_BYTES }
    }

    /// For an unknown page size: the kernel rejects a string that is too long.
    pub fn without_string_limit() -> Self {
        ExecSpace { max_string_bytes: MAX_EXEC_BYTES, left_bytes: MAX_EXEC_BYTES }
    }

    /// How long the next string may be.
    pub fn next_bytes(&self) -> usize {
        self.max_string_bytes.min(self.left_bytes.saturating_sub(NUL_BYTES + POINTER_BYTES))
    }

    /// Takes the space of one string. `name` is used in the error.
    pub fn take(&mut self, string_bytes: usize, name: impl FnOnce() -> String) -> Result<(), ConfigError> {
        let left_bytes = self.left_bytes.checked_sub(cost(string_bytes));
        match left_bytes.filter(|_| string_bytes <= self.max_string_bytes) {
            Some(left_bytes) => {
                self.left_bytes = left_bytes;
                Ok(())
            }
            None => Err(self.refusal(&name())),
        }
    }

    /// Frees the space of a string.
    pub fn give_back(&mut self, string_bytes: usize) {
        self.left_bytes = self.left_bytes.saturating_add(cost(string_bytes)).min(MAX_EXEC_BYTES);
    }

    pub fn refusal(&self, name: &str) -> ConfigError {
        ConfigError(format!(
            "{name} is too long: the kernel takes {} bytes in one string, and {MAX_EXEC_BYTES} bytes of command and \
             environment together",
            self.max_string_bytes
        ))
    }

    /// The words of a command with their references expanded. `field` names them in the error.
    pub fn words<'a>(
        &mut self,
        words: &[String],
        field: &str,
        mut value_of: impl FnMut(&str) -> Option<&'a [u8]>,
    ) -> Result<Vec<String>, ConfigError> {
        let mut expanded = Vec::with_capacity(words.len());
        for (index, word) in words.iter().enumerate() {
            let name = || format!("{field}[{index}]");
            let text = expand(word, self.next_bytes(), &mut value_of).ok_or_else(|| self.refusal(&name()))?;
            let text =
                String::from_utf8(text).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
            self.take(text.len(), name)?;
            expanded.push(text);
        }
        Ok(expanded)
    }
}

fn cost(string_bytes: usize) -> usize {
    string_bytes.saturating_add(NUL_BYTES + POINTER_BYTES)
}

/// A name for a message: quoted and cut.
pub fn shown(name: &str) -> String {
    match &name[..name.floor_char_boundary(MAX_SHOWN_NAME_BYTES)] {
        all if all.len() == name.len() => format!("{name:?}"),
        beginning => format!("{beginning:?}..."),
    }
}

/// Replaces `$(NAME)` by its value; `$$` is a dollar, and unknown names stay as they are. `None`: the text would exceed the
/// limit. It is never built beyond it.
pub fn expand<'a>(
    text: &str,
    limit_bytes: usize,
    mut value_of: impl FnMut(&str) -> Option<&'a [u8]>,
) -> Option<Vec<u8>> {
    let mut expanded = Bounded { bytes: Vec::with_capacity(text.len().min(limit_bytes)), limit_bytes };
    let mut rest = text;
    // Searched once: a text full of `$(` without an end would be quadratic.
    let last_end = text.rfind(')');
    while let Some(dollar) = rest.find('$') {
        expanded.push(&rest.as_bytes()[..dollar])?;
        let after = &rest[dollar + 1..];
        if let Some(escaped) = after.strip_prefix('$') {
            expanded.push(b"$")?;
            rest = escaped;
            continue;
        }
        let is_closed = last_end.is_some_and(|end| end >= text.len() - after.len());
        let reference = after.strip_prefix('(').filter(|_| is_closed).and_then(|after| after.split_once(')'));
        match reference {
            Some((name, tail)) => {
                match value_of(name) {
                    Some(value) => expanded.push(value)?,
                    None => [b"$(", name.as_bytes(), b")"].into_iter().try_for_each(|part| expanded.push(part))?,
                }
                rest = tail;
            }
            None => {
                expanded.push(b"$")?;
                rest = after;
            }
        }
    }
    expanded.push(rest.as_bytes())?;
    Some(expanded.bytes)
}

struct Bounded {
    bytes: Vec<u8>,
    limit_bytes: usize,
}

impl Bounded {
    /// `None`: it does not fit, and nothing is added.
    fn push(&mut self, part: &[u8]) -> Option<()> {
        self.bytes.len().checked_add(part.len()).filter(|bytes| *bytes <= self.limit_bytes)?;
        self.bytes.extend_from_slice(part);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    type Values = BTreeMap<String, Vec<u8>>;

    fn expanded_with(text: &str, limit_bytes: usize, values: &Values) -> Option<String> {
        let bytes = expand(text, limit_bytes, |name| values.get(name).map(Vec::as_slice))?;
        Some(String::from_utf8(bytes).expect("only text was put in"))
    }

    fn values(pairs: &[(&str, &str)]) -> Values {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec())).collect()
    }

    #[test]
    fn references_expand_as_upstream_expands_them() {
        let values = values(&[("A", "1"), ("E", "")]);
        for (text, expected) in [
            ("$(A)", "1"),
            ("x$(A)y$(A)", "x1y1"),
            ("$(B)", "$(B)"),
            ("$(E)|", "|"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$$$$(A)", "$$(A)"),
            ("$(A", "$(A"),
            ("$(A)$(A", "1$(A"),
            ("$A", "$A"),
            ("$", "$"),
            ("a$", "a$"),
            ("$()", "$()"),
            ("$($(A))", "$($(A))"),
            ("$é$(A)", "$é1"),
            ("$$", "$"),
        ] {
            assert_eq!(expanded_with(text, 100, &values).as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn unclosed_references_take_time_in_proportion() {
        let text = "$(".repeat(1 << 20);
        assert_eq!(expanded_with(&text, text.len(), &Values::new()), Some(text));
    }

    #[test]
    fn the_kernels_limits_hold_to_the_byte() {
        let mut space = ExecSpace::new(4096);
        let name = || "it".to_owned();
        assert_eq!(space.next_bytes(), 131_071);
        assert!(space.take(131_072, name).is_err());
        for _ in 0..47 {
            space.take(131_071, name).unwrap();
        }
        // Each of them took its pointer as well.
        let rest = MAX_EXEC_BYTES - 47 * (131_072 + 8) - 9;
        assert_eq!(space.next_bytes(), rest);
        assert!(space.take(rest + 1, name).is_err());
        space.take(rest, name).unwrap();
        assert!(space.take(0, name).is_err());
        space.give_back(rest);
        assert_eq!(space.next_bytes(), rest);
    }

    #[test]
    fn a_name_in_a_message_is_short() {
        assert_eq!(shown("a"), "\"a\"");
        let long = shown(&"é".repeat(1000));
        assert_eq!((long.chars().count(), long.ends_with("\"...")), (128 + 5, true));
    }

    proptest! {
        #[test]
        fn doubled_dollars_protect_any_text(text in ".*") {
            let doubled = text.replace('$', "$$");
            prop_assert_eq!(expanded_with(&doubled, doubled.len(), &values(&[("A", "1")])), Some(text));
        }

        #[test]
        fn text_without_known_names_keeps_everything_but_doubled_dollars(text in "[a-z$()A ]{0,20}") {
            prop_assume!(!text.contains("$$"));
            prop_assert_eq!(expanded_with(&text, text.len(), &Values::new()), Some(text));
        }

        /// The same as without a limit, or nothing; and at most the memory of a vector that grows to the limit.
        #[test]
        fn expansion_never_exceeds_its_limit(text in "([a-z$()A]|\\$\\(A\\)){0,30}", value in ".{0,40}", limit in 0_usize..400) {
            let values = values(&[("A", value.as_str())]);
            let whole = expanded_with(&text, usize::MAX, &values).expect("there is no limit");
            let bytes = expand(&text, limit, |name| values.get(name).map(Vec::as_slice));
            match &bytes {
                Some(bytes) => {
                    prop_assert_eq!(bytes.as_slice(), whole.as_bytes());
                    prop_assert!(bytes.len() <= limit && bytes.capacity() <= (2 * limit).max(8));
                }
                None => prop_assert!(whole.len() > limit),
            }
        }
    }
}
