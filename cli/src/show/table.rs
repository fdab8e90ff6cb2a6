//! Tables of text in columns, and numbers in few digits.
use slipgate_policy::one_line;

/// Lines of cells, each column as wide as its widest cell. `right`: columns of numbers.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>], right: &[usize]) -> String {
    let rows: Vec<Vec<String>> = rows
        .iter()
        .map(|row| row.iter().map(|cell| one_line(cell)).collect())
        .collect();
    let widths: Vec<usize> = head
        .iter()
        .enumerate()
        .map(|(i, title)| {
            let cells = rows.iter().filter_map(|row| row.get(i));
            cells
                .map(|cell| cell.chars().count())
                .chain([title.len()])
                .max()
                .unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut out = String::new();
        for (i, (cell, &width)) in cells.zip(&widths).enumerate() {
            if i > 0 {
                out.push_str("  ");
            }
            if right.contains(&i) {
                out.push_str(&format!("{cell:>width$}"));
            } else {
                out.push_str(&format!("{cell:<width$}"));
            }
        }
        text.push_str(out.trim_end());
        text.push('\n');
    };
    line(&mut head.iter().copied());
    for row in &rows {
        line(&mut row.iter().map(String::as_str));
    }
    text
}

/// 1536 → "1.5K"; decimal steps of 1000, three digits.
pub(crate) fn amount(n: u64) -> String {
    const UNITS: [&str; 7] = ["", "K", "M", "G", "T", "P", "E"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 || value >= 99.95 {
        format!("{value:.0}{}", UNITS[unit])
    } else {
        format!("{value:.1}{}", UNITS[unit])
    }
}

/// "1 flow", "2 flows".
pub(crate) fn counted(n: u64, of: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{n} {of}{s}")
}

/// Milliseconds as "250ms", "12s", "3m04s", "2h05m".
pub(crate) fn span(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0 => format!("{ms}ms"),
        1..60 => format!("{s}s"),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        _ => format!("{}h{:02}m", s / 3600, s / 60 % 60),
    }
}

#[cfg(test)]
#[path = "table_test.rs"]
mod tests;
