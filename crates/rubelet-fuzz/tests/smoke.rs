//! Every target on its corpus, and on mutations of it that are the same in each run.
//!
//! Owns: the mutations. They find less than libFuzzer does, but on any toolchain and with every change.

use std::{fs, path::Path};

use rubelet_fuzz::{TARGETS, Target};

/// Together a few seconds.
const MUTATIONS: usize = 1500;
const MAX_INPUT_BYTES: usize = 4096;
/// Bytes and texts at which parsers branch.
const TOKENS: &[&[u8]] = &[
    b"\0",
    b"\xff",
    b"\n",
    b" ",
    b"-",
    b"-1",
    b"0",
    b"9223372036854775808",
    b"1e99",
    b"$(A)",
    b"$$",
    b"..",
    b"/",
    b"\"",
    b"{}",
    b"[]",
    b"null",
    b":",
    b"=",
    b"%00",
    b"\\",
    b"\xc3\xa4",
    b"\xf0\x9f\x98\x80",
    b"\x7f\xff\xff\xff",
];

/// Xorshift: the same numbers in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit.max(1) as u64).expect("below a usize")
    }

    fn range(&mut self, bytes: &[u8]) -> std::ops::Range<usize> {
        let start = self.below(bytes.len() + 1);
        start..start + self.below((bytes.len() - start).min(32) + 1)
    }
}

fn mutated(corpus: &[Vec<u8>], dice: &mut Dice) -> Vec<u8> {
    let mut bytes = corpus[dice.below(corpus.len())].clone();
    for _ in 0..=dice.below(4) {
        let at = dice.range(&bytes);
        match dice.below(6) {
            0 => bytes[at].iter_mut().take(1).for_each(|byte| *byte ^= 1 << dice.below(8)),
            1 => drop(bytes.drain(at)),
            2 => drop(bytes.splice(at, TOKENS[dice.below(TOKENS.len())].iter().copied())),
            3 => {
                let copied = bytes[at].to_vec();
                let to = dice.below(bytes.len() + 1);
                bytes.splice(to..to, copied);
            }
            4 => {
                let other = &corpus[dice.below(corpus.len())];
                let from = dice.range(other);
                bytes.splice(at, other[from].iter().copied());
            }
            _ => bytes.truncate(at.start),
        }
    }
    bytes.truncate(MAX_INPUT_BYTES);
    bytes
}

fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target.name);
    let entries = fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.expect("a readable directory").path()).collect();
    files.sort();
    files.iter().map(|file| fs::read(file).expect("a readable file")).collect()
}

/// One test, because targets share the limit of memory.
#[test]
fn fuzz_targets_pass_on_mutations_of_the_corpus() {
    let mut failed = Vec::new();
    for target in TARGETS {
        let corpus = corpus(target);
        assert!(!corpus.is_empty(), "{target:?} has no corpus");
        assert!(corpus.iter().all(|input| input.len() <= MAX_INPUT_BYTES), "an input of {target:?} is too long");
        assert!(corpus.iter().any(|input| target.run(input)), "no input of {target:?} is valid");
        let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
        let mutations = std::iter::repeat_with(|| mutated(&corpus, &mut dice)).take(MUTATIONS);
        let mut inputs = corpus.iter().cloned().chain(mutations);
        // The first of each target: its cause is above this in the output.
        if let Some(input) = inputs.find(|input| std::panic::catch_unwind(|| target.run(input)).is_err()) {
            failed.push(format!("{target:?} fails on b\"{}\"", input.escape_ascii()));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
