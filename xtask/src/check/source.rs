//! A minimal Rust scanner that finds functions, structs and macros in a file.
//!
//! Owns: blanking out comments and literals, matching braces. A parser would be more exact and cost a minute of every build.

/// A source file with ignored parts blanked out; every byte is still at its place.
#[derive(Debug)]
pub struct Source {
    /// Comments and the insides of literals are spaces, and so are modules under `#[cfg(test)]`.
    code: String,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Function {
    pub name: String,
    /// From `fn` to the closing brace.
    pub lines: usize,
}

/// `const NAME: TYPE = VALUE;`, on one line.
#[derive(Debug, PartialEq, Eq)]
pub struct Constant {
    pub name: String,
    pub kind: String,
    pub value: String,
}

impl Source {
    pub fn parse(text: &str) -> Self {
        let mut source = Source { code: blank_literals(text) };
        source.blank_test_modules();
        source
    }

    /// Lines with code outside of test modules, plus the comments and empty lines between them.
    pub fn lines(&self, text: &str) -> usize {
        let mut masked = text.as_bytes().to_vec();
        for (place, byte) in masked.iter_mut().enumerate() {
            if self.code.as_bytes()[place] == TEST {
                *byte = b' ';
            }
        }
        let masked = String::from_utf8_lossy(&masked).into_owned();
        masked.trim_end().lines().count()
    }

    pub fn functions(&self) -> Vec<Function> {
        let mut found = Vec::new();
        for place in self.words("fn") {
            let after = &self.code[place + 2..];
            let name: String = after.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            // `fn(u8)` is a type.
            if name.is_empty() {
                continue;
            }
            if let Some((_, end)) = self.body(place) {
                let lines = self.code[place..end].matches('\n').count() + 1;
                found.push(Function { name, lines });
            }
        }
        found
    }

    /// Values that hold literals are incomplete.
    pub fn constants(&self) -> Vec<Constant> {
        let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let definitions = self.words("const").filter_map(|place| self.code[place + "const".len()..].split_once(';'));
        let found = definitions.filter_map(|(definition, _)| {
            let (declaration, value) = definition.split_once('=')?;
            let (name, kind) = declaration.split_once(':')?;
            Some(Constant { name: one_line(name), kind: one_line(kind), value: one_line(value) })
        });
        found.collect()
    }

    /// How many `select!` do not begin with `biased;`.
    pub fn unbiased_selects(&self) -> usize {
        let starts = self.code.match_indices("select!").map(|(place, word)| place + word.len());
        let bodies = starts.filter_map(|place| self.code[place..].trim_start().strip_prefix('{'));
        bodies.filter(|body| !body.trim_start().starts_with("biased;")).count()
    }

    /// The number of fields of a struct with named fields.
    pub fn fields(&self, name: &str) -> Option<usize> {
        let place = self.words("struct").find(|place| {
            let rest = self.code[place + "struct".len()..].trim_start();
            rest.strip_prefix(name).is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
        })?;
        let (start, end) = self.body(place)?;
        let mut depth = 0;
        let mut count = 0;
        for (at, c) in self.code[start + 1..end - 1].char_indices() {
            match c {
                '{' | '(' | '[' | '<' => depth += 1,
                '}' | ')' | ']' | '>' => depth -= 1,
                // A path has two colons, a field one.
                ':' if depth == 0 => {
                    let around = &self.code[start + at..start + at + 3];
                    count += usize::from(!around.contains("::"));
                }
                _ => {}
            }
        }
        Some(count)
    }

    /// Whether the code, without comments, literals and tests, contains this text as a whole word.
    pub fn mentions(&self, text: &str) -> bool {
        self.words(text).next().is_some()
    }

    fn words<'a>(&'a self, word: &'a str) -> impl Iterator<Item = usize> + 'a {
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        self.code.match_indices(word).map(|(place, _)| place).filter(move |place| {
            let before = self.code[..*place].chars().next_back();
            let after = self.code[place + word.len()..].chars().next();
            let opens = word.starts_with(is_name) && before.is_some_and(is_name);
            let runs_on = word.ends_with(is_name) && after.is_some_and(is_name);
            !opens && !runs_on
        })
    }

    /// The next braces after `place`, unless a semicolon comes first.
    fn body(&self, place: usize) -> Option<(usize, usize)> {
        let mut nesting = 0;
        for (at, byte) in self.code.bytes().enumerate().skip(place) {
            match byte {
                b'(' | b'[' => nesting += 1,
                b')' | b']' => nesting -= 1,
                b';' if nesting == 0 => return None,
                b'{' if nesting == 0 => return Some((at, self.closing(at)?)),
                _ => {}
            }
        }
        None
    }

    /// Just behind the brace that closes the one at `open`.
    fn closing(&self, open: usize) -> Option<usize> {
        let mut depth = 0;
        for (at, byte) in self.code.bytes().enumerate().skip(open) {
            match byte {
                b'{' => depth += 1,
                b'}' => depth -= 1,
                _ => continue,
            }
            if depth == 0 {
                return Some(at + 1);
            }
        }
        None
    }

    fn blank_test_modules(&mut self) {
        while let Some(place) = self.code.find("#[cfg(test)]") {
            let end = self.body(place + 1).map_or(place + "#[cfg(test)]".len(), |(_, end)| end);
            let mut bytes = std::mem::take(&mut self.code).into_bytes();
            for byte in bytes[place..end].iter_mut().filter(|byte| **byte != b'\n') {
                *byte = TEST;
            }
            self.code = String::from_utf8(bytes).expect("only whole characters became ASCII");
        }
    }
}

/// Marks test code; it occurs in no source.
const TEST: u8 = 1;

#[derive(Clone, Copy)]
enum Inside {
    Code,
    LineComment,
    BlockComment(u32),
    Text,
    RawText(usize),
}

fn blank_literals(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut inside = Inside::Code;
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let (length, next, keep) = token(rest, inside);
        let length = length.min(rest.len());
        let blank = |byte: &u8| if *byte == b'\n' { b'\n' } else { b' ' };
        if keep {
            out.extend(&rest[..length])
        } else {
            out.extend(rest[..length].iter().map(blank))
        }
        rest = &rest[length..];
        inside = next;
    }
    String::from_utf8(out).expect("whole characters were kept or became spaces")
}

/// How many bytes belong together, what follows them, and whether they are code.
fn token(rest: &[u8], inside: Inside) -> (usize, Inside, bool) {
    match inside {
        Inside::Code => code_token(rest),
        Inside::LineComment if rest[0] == b'\n' => (1, Inside::Code, true),
        Inside::LineComment => (1, inside, false),
        Inside::BlockComment(depth) if rest.starts_with(b"/*") => (2, Inside::BlockComment(depth + 1), false),
        Inside::BlockComment(1) if rest.starts_with(b"*/") => (2, Inside::Code, false),
        Inside::BlockComment(depth) if rest.starts_with(b"*/") => (2, Inside::BlockComment(depth - 1), false),
        Inside::BlockComment(_) => (1, inside, false),
        Inside::Text if rest[0] == b'\\' => (2, inside, false),
        Inside::Text if rest[0] == b'"' => (1, Inside::Code, true),
        Inside::Text => (1, inside, false),
        Inside::RawText(hashes) => {
            let ends = rest[0] == b'"' && rest[1..].iter().take_while(|byte| **byte == b'#').count() >= hashes;
            if ends { (1 + hashes, Inside::Code, true) } else { (1, inside, false) }
        }
    }
}

fn code_token(rest: &[u8]) -> (usize, Inside, bool) {
    if rest.starts_with(b"//") {
        return (2, Inside::LineComment, false);
    }
    if rest.starts_with(b"/*") {
        return (2, Inside::BlockComment(1), false);
    }
    if rest[0] == b'"' {
        return (1, Inside::Text, true);
    }
    if rest[0] == b'r' {
        let hashes = rest[1..].iter().take_while(|byte| **byte == b'#').count();
        if rest.get(1 + hashes) == Some(&b'"') {
            return (2 + hashes, Inside::RawText(hashes), true);
        }
    }
    if rest[0].is_ascii_alphanumeric() || rest[0] == b'_' {
        // A whole name, so that an r at its end opens no raw string.
        let length = rest.iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_').count();
        let opens_text = length == 1 && (rest[0] == b'b' || rest[0] == b'c');
        let opens_raw = length == 2 && (rest.starts_with(b"br") || rest.starts_with(b"cr"));
        return if opens_raw {
            (1, Inside::Code, true)
        } else {
            (length.max(usize::from(opens_text)), Inside::Code, true)
        };
    }
    if rest[0] == b'\'' {
        // A character, or the beginning of a lifetime.
        let escaped = rest.get(1) == Some(&b'\\');
        let end = rest.iter().skip(if escaped { 3 } else { 2 }).take(10).position(|byte| *byte == b'\'');
        let length = end.map_or(1, |end| end + if escaped { 4 } else { 3 });
        let is_char = escaped || std::str::from_utf8(&rest[1..length.max(2) - 1]).is_ok_and(|c| c.chars().count() == 1);
        if length > 1 && is_char {
            return (length, Inside::Code, false);
        }
    }
    (1, Inside::Code, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn braces_in_comments_and_literals_do_not_count() {
        let source = Source::parse(
            "fn a() {\n  // }\n  /* { /* } */ */\n  let x = \"}\\\"\"; let y = '}'; let z = r#\"}\"\"#;\n}\nfn b(f: fn(u8)) {}\n",
        );
        let functions: Vec<_> = source.functions().into_iter().map(|f| (f.name, f.lines)).collect();
        assert_eq!(functions, [("a".to_owned(), 5), ("b".to_owned(), 1)]);
    }

    #[test]
    fn lifetimes_are_not_taken_for_characters() {
        let source =
            Source::parse("fn a<'a>(x: &'a str) -> &'a str {\n  match c { 'é' => x, '\\'' => x, '{' => x }\n}\n");
        assert_eq!(source.functions(), [Function { name: "a".to_owned(), lines: 3 }]);
    }

    #[test]
    fn test_modules_do_not_count() {
        let text = "fn a() {}\n\n#[cfg(test)]\nmod tests {\n  fn long() {\n  }\n}\n";
        let source = Source::parse(text);
        assert_eq!(source.functions().len(), 1);
        assert_eq!(source.lines(text), 1);
    }

    #[test]
    fn a_select_must_begin_with_biased() {
        assert_eq!(Source::parse("tokio::select! {\n  biased;\n  x = y => {}\n}").unbiased_selects(), 0);
        assert_eq!(Source::parse("tokio::select! {\n  // biased;\n  x = y => {}\n}").unbiased_selects(), 1);
    }

    #[test]
    fn fields_are_counted_and_paths_are_not() {
        let text = "pub struct AgentX { z: u8 }\npub struct Agent {\n  a: std::x::B<C, D>,\n  pub b: (u8, [u8; 2]),\n  c: Vec<u8>,\n}";
        assert_eq!(Source::parse(text).fields("Agent"), Some(3));
    }

    #[test]
    fn constants_are_found_outside_of_tests() {
        let text = "pub(crate) const A: u8 =\n    1 << 2; // const B: u8 = 1;\nconst fn c() {}\n#[cfg(test)]\nmod tests {\n  const D: u8 = 1;\n}";
        let (name, kind, value) = ("A".to_owned(), "u8".to_owned(), "1 << 2".to_owned());
        assert_eq!(Source::parse(text).constants(), [Constant { name, kind, value }]);
    }

    #[test]
    fn a_mention_is_a_whole_name() {
        let source = Source::parse("use x::MyHashMap; // HashMap\nlet a = \"HashMap\";");
        assert!(!source.mentions("HashMap"));
        assert!(Source::parse("let m: HashMap<u8, u8>;").mentions("HashMap"));
    }
}
