use super::*;

/// Reads of a turn in which so many frames wait, that which finds nothing included; and what is left.
fn reads(in_row: &mut InRow, waiting: usize) -> (usize, usize) {
    in_row.begin_turn(waiting > 0);
    let mut taken = 0;
    while taken < waiting {
        taken += 1;
        if !in_row.goes_on_after(taken) {
            return (taken, waiting - taken);
        }
    }
    (taken + usize::from(waiting > 0), 0)
}

#[test]
fn a_frame_that_comes_alone_is_read_alone() {
    let mut in_row = InRow::default();
    for _ in 0..10 {
        assert_eq!(reads(&mut in_row, 1), (1, 0));
        assert_eq!(reads(&mut in_row, 0), (0, 0), "a turn of others");
    }
}

#[test]
fn of_the_first_row_the_first_frame_is_read_alone() {
    let mut in_row = InRow::default();
    assert_eq!(reads(&mut in_row, 5), (1, 4));
    assert_eq!(reads(&mut in_row, 4), (5, 0), "the next turn goes on");
    for _ in 0..10 {
        assert_eq!(reads(&mut in_row, 0), (0, 0));
        assert_eq!(reads(&mut in_row, 5), (6, 0), "as the last time");
    }
}

#[test]
fn frames_of_turns_in_a_row_are_read_to_the_end() {
    let mut in_row = InRow::default();
    assert_eq!(reads(&mut in_row, 1), (1, 0));
    for _ in 0..10 {
        assert_eq!(reads(&mut in_row, 1), (2, 0));
    }
}

#[test]
fn a_frame_alone_ends_what_is_known_of_rows() {
    let mut in_row = InRow::default();
    reads(&mut in_row, 5);
    reads(&mut in_row, 4);
    reads(&mut in_row, 0);
    assert_eq!(reads(&mut in_row, 1), (2, 0), "there might have been more");
    reads(&mut in_row, 0);
    assert_eq!(reads(&mut in_row, 1), (1, 0));
}
