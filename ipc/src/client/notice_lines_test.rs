use super::*;

fn line(pid: u32) -> String {
    format!(
        r#"{{"machine": {{"name": "a", "pid": {pid}, "state": "paused", "cpus": 1, "memory_mib": 64, "tap": null, "netns": 1, "runs_s": 2}}, "event": null}}"#
    ) + "\n"
}

fn pids(notices: &[MachineNotice]) -> Vec<u32> {
    notices.iter().map(|notice| notice.machine.pid).collect()
}

#[test]
fn notices_are_the_same_however_they_are_divided() {
    let text = [&line(1), "nonsense\n{}\n\n", &line(2), &line(3)].concat();
    for length in [1, 2, 7, text.len()] {
        let mut lines = NoticeLines::default();
        let notices = text.as_bytes().chunks(length);
        let notices: Vec<_> = notices.flat_map(|piece| lines.take(piece)).collect();
        assert_eq!(pids(&notices), [1, 2, 3]);
    }
}

#[test]
fn nothing_is_read_after_a_line_that_is_too_long() {
    let longest = " ".repeat(MAX_NOTICE - line(1).len()) + &line(1);
    let too_long = " ".repeat(MAX_NOTICE + 1 - line(1).len()) + &line(1);
    let text = [&longest[..], &line(2), &too_long, &line(3)].concat();
    for length in [1, 100, text.len()] {
        let mut lines = NoticeLines::default();
        let mut notices = Vec::new();
        for piece in text.as_bytes().chunks(length) {
            notices.extend(lines.take(piece));
            assert!(lines.kept_bytes() <= 2 * MAX_NOTICE);
        }
        assert_eq!(pids(&notices), [1, 2]);
        assert!(lines.is_over() && lines.kept_bytes() == 0);
    }
}
