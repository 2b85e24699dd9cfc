//! Output of the command line: tables, ages, sizes, untrusted text.
//!
//! Owns: kubectl's table layout. Upstream: `HumanDuration`, the tab writer of kubectl's printers.

use jiff::Timestamp;

/// A table printed line by line: columns only get wider.
#[derive(Clone, Debug, Default)]
pub(super) struct Columns {
    widths: Vec<usize>,
}

impl Columns {
    /// Widens the columns for these rows.
    pub(super) fn fit(&mut self, rows: &[Vec<String>]) {
        for row in rows {
            self.widths.resize(self.widths.len().max(row.len()), 0);
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
    }

    pub(super) fn line(&self, row: &[String]) -> String {
        let mut line = String::new();
        for (position, cell) in row.iter().enumerate() {
            line.push_str(cell);
            if position + 1 < row.len() {
                // kubectl's minimum cell width is 6, and cells are separated by 3 blanks.
                let width = (self.widths.get(position).copied().unwrap_or(0) + 3).max(6);
                line.extend(std::iter::repeat_n(' ', width.saturating_sub(cell.chars().count())));
            }
        }
        line.push('\n');
        line
    }
}

/// A complete table.
pub(super) fn table(rows: &[Vec<String>]) -> String {
    let mut columns = Columns::default();
    columns.fit(rows);
    rows.iter().map(|row| columns.line(row)).collect()
}

/// Escapes text from containers and manifests for a terminal, on one line.
pub(super) fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for symbol in text.trim_end().chars() {
        if symbol.is_control() { safe.extend(symbol.escape_default()) } else { safe.push(symbol) }
    }
    safe
}

/// The time since, formatted as kubectl does.
pub(super) fn age(moment: Timestamp, now: Timestamp) -> String {
    short(now.duration_since(moment).as_secs())
}

/// The time until.
pub(super) fn until(moment: Timestamp, now: Timestamp) -> String {
    match moment.duration_since(now).as_secs() {
        secs if secs <= 0 => "now".to_owned(),
        secs => format!("in {}", short(secs)),
    }
}

/// Bytes for people: `512B`, `14.2Gi`.
pub(super) fn bytes(count: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
    let unit = UNITS.into_iter().find(|(_, shift)| count >> shift > 0);
    #[expect(clippy::cast_precision_loss, reason = "one digit after the point is shown")]
    unit.map_or_else(
        || format!("{count}B"),
        |(name, shift)| format!("{:.1}{name}", count as f64 / (1_u64 << shift) as f64),
    )
}

pub(super) fn short(secs: i64) -> String {
    let (minutes, hours, days) = (secs / 60, secs / 3600, secs / 86_400);
    let two = |large: i64, unit: char, small: i64, small_unit: char| match small {
        0 => format!("{large}{unit}"),
        small => format!("{large}{unit}{small}{small_unit}"),
    };
    match secs {
        // Clocks may differ by a second.
        ..=-2 => "<invalid>".to_owned(),
        -1 => "0s".to_owned(),
        _ if secs < 120 => format!("{secs}s"),
        _ if minutes < 10 => two(minutes, 'm', secs % 60, 's'),
        _ if minutes < 180 => format!("{minutes}m"),
        _ if hours < 8 => two(hours, 'h', minutes % 60, 'm'),
        _ if hours < 48 => format!("{hours}h"),
        _ if hours < 192 => two(days, 'd', hours % 24, 'h'),
        _ if hours < 24 * 365 * 2 => format!("{days}d"),
        _ if hours < 24 * 365 * 8 => two(days / 365, 'y', days % 365, 'd'),
        _ => format!("{}y", days / 365),
    }
}

#[cfg(test)]
mod tests {
    use super::{bytes, printable, short, table};

    #[test]
    fn ages_are_kubectls() {
        let cases = [
            (-5, "<invalid>"),
            (-1, "0s"),
            (119, "119s"),
            (120, "2m"),
            (125, "2m5s"),
            (600, "10m"),
            (10_740, "179m"),
            (10_800, "3h"),
            (11_100, "3h5m"),
            (30_000, "8h"),
            (172_799, "47h"),
            (172_800, "2d"),
            (176_400, "2d1h"),
            (86_400 * 8, "8d"),
            (86_400 * 730, "2y"),
            (86_400 * 731, "2y1d"),
            (86_400 * 365 * 9, "9y"),
        ];
        for (secs, expected) in cases {
            assert_eq!(short(secs), expected, "{secs}");
        }
    }

    #[test]
    fn bytes_have_one_digit_after_the_point() {
        let table = [(0, "0B"), (1023, "1023B"), (1024, "1.0Ki"), (15_247_000_000, "14.2Gi"), (3 << 50, "3072.0Ti")];
        for (count, expected) in table {
            assert_eq!(bytes(count), expected);
        }
    }

    #[test]
    fn a_column_is_as_wide_as_its_widest_cell() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        let rows = [row(["A", "NAME", "X"]), row(["1", "a longer one", "y"])];
        assert_eq!(table(&rows), "A     NAME           X\n1     a longer one   y\n");
    }

    #[test]
    fn control_characters_of_containers_are_escaped() {
        assert_eq!(printable("a\x1b[2Jb\nc\u{9b}é\n"), "a\\u{1b}[2Jb\\nc\\u{9b}é");
    }
}
