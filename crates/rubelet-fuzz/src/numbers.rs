//! Quantities and durations.
//!
//! Owns: that they are read as a slow and simple reader reads them, and back as they are written.

use rubelet_core::{config::GoDuration, quantity::Quantity};

/// Beyond this a double is not exact.
const RELATIVE_ERROR: f64 = 1e-9;
const LARGEST: f64 = i64::MAX as f64;
const NANO: f64 = 1e-9;

pub(crate) fn quantity(data: &[u8]) -> Option<()> {
    let text = std::str::from_utf8(data).ok()?;
    let quantity = Quantity::parse(text).ok()?;
    assert_eq!(Quantity::parse(&quantity.decimal_text().0), Ok(quantity), "{text}");
    let in_bytes = Quantity::parse(&quantity.binary_text().0).expect("our own text");
    assert_eq!(in_bytes.value(), quantity.value(), "{text}");
    let expected = approximate(text).clamp(-LARGEST, LARGEST);
    let found = quantity.millis() as f64 / 1000.0;
    // Thousandths are rounded away from zero, and beyond their range they are at its end.
    let error = (found - expected).abs();
    let is_in_range = expected.abs() < LARGEST / 1000.0;
    assert!(!is_in_range || error <= expected.abs() * RELATIVE_ERROR + 0.001 + NANO, "{text}: {found}, not {expected}");
    Some(())
}

/// The value of a valid quantity as a double.
fn approximate(text: &str) -> f64 {
    let suffix_at = text.find(|letter: char| !"+-.0123456789".contains(letter)).unwrap_or(text.len());
    let (number, suffix) = text.split_at(suffix_at);
    let number: f64 = number.parse().expect("digits and a point");
    match suffix {
        "n" => number * 1e-9,
        "u" => number * 1e-6,
        "m" => number * 1e-3,
        "" => number,
        "Ki" | "Mi" | "Gi" | "Ti" | "Pi" | "Ei" => number * 1024_f64.powi(place(suffix, "KMGTPE")),
        "k" | "M" | "G" | "T" | "P" | "E" => number * 1000_f64.powi(place(suffix, "kMGTPE")),
        exponent => format!("{}{exponent}", &text[..suffix_at]).parse().expect("an exponent"),
    }
}

fn place(suffix: &str, letters: &str) -> i32 {
    letters.find(&suffix[..1]).and_then(|at| i32::try_from(at + 1).ok()).expect("a known letter")
}

pub(crate) fn duration(data: &[u8]) -> Option<()> {
    let text = std::str::from_utf8(data).ok()?;
    let duration = text.parse::<GoDuration>().ok()?;
    assert_eq!(duration.to_string().parse(), Ok(duration), "{text}");
    assert_eq!(duration.as_std().is_zero(), duration.as_nanos() <= 0, "{text}");
    assert_eq!(text.starts_with('-') && duration.as_nanos() != 0, duration.as_nanos() < 0, "{text}");
    Some(())
}
