use super::*;

fn figures() -> DiskFigures {
    DiskFigures {
        case: 1,
        what: DiskCase::writes(32, 64),
        requests: 4000,
        flushes: 62,
        took_us: 200_000.5,
        p50_us: 33.25,
        p99_us: 78.0,
    }
}

#[test]
fn lines_are_read_as_they_were_written() {
    let ready = DiskLine::Ready {
        case: 0,
        clock: "kvm-clock".to_owned(),
    };
    let failed = DiskLine::Failed {
        why: "open \"/dev/vda\"".to_owned(),
    };
    for line in [ready, DiskLine::Figures(figures()), failed] {
        let text = line.to_string();
        assert!(
            text.starts_with(DiskLine::PART) && !text.contains('\n'),
            "{text}"
        );
        assert_eq!(DiskLine::read(&text), Some(line));
    }
}

#[test]
fn the_kernel_s_words_on_the_same_line_are_skipped() {
    let line = DiskLine::Figures(figures());
    let noisy = format!("[    1.25] virtio_blk: 1 GB {line}[    1.26] random: {{}}");
    assert_eq!(DiskLine::read(&noisy), Some(line));
}

#[test]
fn another_line_and_one_that_was_cut_are_none() {
    let whole = DiskLine::Figures(figures()).to_string();
    for line in [
        "",
        "ok lease",
        "{\"disk\":\"other\"}",
        &whole[..whole.len() - 1],
    ] {
        assert_eq!(DiskLine::read(line), None, "{line}");
    }
    // A figure of another kind than a number is none.
    let text = whole.replace("4000", "\"many\"");
    assert_eq!(DiskLine::read(&text), None);
}
