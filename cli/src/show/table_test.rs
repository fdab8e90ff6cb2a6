use super::*;

#[test]
fn columns_are_as_wide_as_their_widest_cell() {
    let rows = [
        vec!["a".to_owned(), "1".to_owned()],
        vec!["longer".to_owned(), "1000".to_owned()],
    ];
    assert_eq!(
        table(&["VM", "N"], &rows, &[1]),
        "VM         N\na          1\nlonger  1000\n"
    );
}

#[test]
fn a_cell_is_on_its_line() {
    let rows = [vec!["a\nb\x1b[m".to_owned()]];
    assert_eq!(table(&["VM"], &rows, &[]), "VM\na\u{fffd}b\u{fffd}[m\n");
}

#[test]
fn amounts_and_spans_are_short() {
    let amounts = [
        0,
        999,
        1000,
        1536,
        99_950,
        999_499,
        999_500,
        12_345_678_901,
        u64::MAX,
    ];
    assert_eq!(
        amounts.map(amount),
        [
            "0", "999", "1.0K", "1.5K", "100K", "999K", "1.0M", "12.3G", "18.4E"
        ]
    );
    assert_eq!(
        [0, 999, 1000, 59_999, 60_000, 184_000, 7_500_000].map(span),
        ["0ms", "999ms", "1s", "59s", "1m00s", "3m04s", "2h05m"]
    );
}

#[test]
fn a_long_table_is_written_while_its_rows_are_made() {
    let mut out = Vec::new();
    let mut columns = Columns::new(&mut out, &["VM", "N"], &[1]);
    for row in 0..ROWS_AT_ONCE {
        columns.cell("a");
        columns.cell(row % 10);
        columns.end_row().unwrap();
    }
    assert!(columns.text.len() < 10, "most rows are written by now");
    columns.cell("longer");
    columns.cell(1_000);
    columns.end_row().unwrap();
    columns.finish().unwrap();
    let text = String::from_utf8(out).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), ROWS_AT_ONCE + 2);
    // Columns get wider with the rows that are wider.
    assert_eq!(lines[..2], ["VM  N", "a   0"]);
    assert_eq!(lines[ROWS_AT_ONCE + 1], "longer  1000");
}
