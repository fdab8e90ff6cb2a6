use super::*;

#[test]
fn a_count_is_read_from_its_line_and_from_no_part_of_one() {
    let line = "counting 12 uptime 34.56 connection live";
    let count = SavedCount {
        number: 12,
        uptime: 34.56,
        connection: "live".into(),
    };
    assert_eq!(SavedCount::read(line), Some(count));
    // A restored machine prints the rest of a line that the saved one began.
    for len in 1..line.len() - 4 {
        assert_eq!(SavedCount::read(&line[len..]), None);
        assert_eq!(SavedCount::read(&line[..len]), None);
    }
}
