//! One program for each target of `rubelet_fuzz::TARGETS`: its name chooses the target.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    rubelet_fuzz::named(env!("CARGO_BIN_NAME")).run(data);
});
