use super::*;
use crate::rig::{count_marked_blocks, make_disk_of_blocks};

const BLOCKS: u64 = 64;

fn disk() -> (tempfile::TempDir, std::path::PathBuf, File) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    make_disk_of_blocks(&path, BLOCKS).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    (folder, path, file)
}

fn work(cases: &[DiskCase]) -> DiskWork {
    DiskWork {
        cases: cases.to_vec(),
        blocks: BLOCKS,
        warm_up_ms: 1,
        measured_ms: 20,
        rest_ms: 0,
    }
}

fn figures(lines: &[DiskLine]) -> Vec<DiskFigures> {
    let figures = |line: &DiskLine| match line {
        DiskLine::Figures(figures) => Some(figures.clone()),
        _ => None,
    };
    lines.iter().filter_map(figures).collect()
}

#[test]
fn each_case_is_announced_and_has_figures() {
    let (_folder, path, file) = disk();
    let cases = [
        DiskCase::reads(1),
        DiskCase::reads(32),
        DiskCase::writes(1, 3),
        DiskCase::writes(32, 64),
    ];
    let mut lines = Vec::new();
    work(&cases)
        .run(&file, "tsc", |line| lines.push(line))
        .unwrap();
    let is_ready =
        |line: &&DiskLine| matches!(line, DiskLine::Ready { clock, .. } if clock == "tsc");
    assert_eq!(
        lines.iter().step_by(2).filter(is_ready).count(),
        cases.len()
    );
    let figures = figures(&lines);
    assert_eq!(
        figures.iter().map(|one| one.what).collect::<Vec<_>>(),
        cases
    );
    for (number, one) in figures.iter().enumerate() {
        assert_eq!(one.case, number);
        assert!(one.requests >= u64::from(one.what.at_once), "{one:?}");
        assert!(one.took_us >= 20e3 && one.p50_us <= one.p99_us, "{one:?}");
        assert!(one.p99_us <= one.took_us, "{one:?}");
        let each = u64::from(one.what.flush_each);
        let flushes = one.requests.checked_div(each).unwrap_or(0);
        assert_eq!(one.flushes, flushes, "{one:?}");
    }
    // How many there are is the file system's speed.
    assert!(count_marked_blocks(&path).unwrap() > 0);
}

#[test]
fn reads_change_nothing() {
    let (_folder, path, file) = disk();
    let cases = [DiskCase::reads(1), DiskCase::reads(32)];
    work(&cases).run(&file, "tsc", |_| ()).unwrap();
    assert_eq!(count_marked_blocks(&path).unwrap(), 0);
}

#[test]
fn a_block_that_is_another_one_is_an_error_with_its_number() {
    for at_once in [1, 32] {
        let (_folder, _path, file) = disk();
        file.write_at(&[0xff], 5 * DISK_BLOCK_BYTES as u64).unwrap();
        let reads = work(&[DiskCase::reads(at_once)]);
        // Each of 64 blocks is among so many.
        let reads = DiskWork {
            measured_ms: 10_000,
            ..reads
        };
        let why = reads.run(&file, "tsc", |_| ()).unwrap_err().to_string();
        assert_eq!(why, "block 5 is another one");
    }
}

#[test]
fn a_request_behind_the_disk_s_end_is_an_error() {
    for at_once in [1, 32] {
        let (_folder, _path, file) = disk();
        let mut reads = work(&[DiskCase::reads(at_once)]);
        reads.blocks = 1 << 30;
        let why = reads.run(&file, "tsc", |_| ()).unwrap_err().to_string();
        assert!(why.contains("0 bytes were moved"), "{why}");
    }
}

#[test]
fn work_without_sense_is_refused() {
    let (_folder, _path, file) = disk();
    for at_once in [0, MOST_AT_ONCE + 1] {
        let none = work(&[DiskCase::reads(at_once)]);
        assert!(none.run(&file, "tsc", |_| ()).is_err());
    }
    let mut none = work(&[DiskCase::reads(1)]);
    none.blocks = 0;
    assert!(none.run(&file, "tsc", |_| ()).is_err());
    assert!(DiskWork::of_text("{}").is_err());
}

#[test]
fn the_work_is_read_as_it_was_written() {
    let work = work(&[DiskCase::reads(32), DiskCase::writes(1, 3)]);
    assert_eq!(DiskWork::of_text(&work.to_text()).unwrap(), work);
}

#[test]
fn percentiles_are_of_the_sorted_times() {
    let done = Done {
        times: (1..=200).rev().map(|us| us * 1000).collect(),
        flushes: 2,
        took: Duration::from_millis(3),
    };
    let figures = done.figures(4, DiskCase::reads(1));
    assert_eq!((figures.p50_us, figures.p99_us), (101.0, 199.0));
    assert_eq!((figures.requests, figures.took_us), (200, 3e3));
}
