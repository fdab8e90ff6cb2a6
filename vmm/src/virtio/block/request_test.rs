use std::sync::atomic::Ordering::SeqCst;

use super::*;
use crate::virtio::block::{DiskConfig, direct::Alignment};

fn image() -> Image {
    let file = tempfile::tempfile().unwrap();
    file.set_len(64 << 20).unwrap();
    Image::new(DiskConfig::plain(file)).unwrap()
}

fn target<'a>(image: &'a Image, counters: &'a DiskCounters, write_through: bool) -> Target<'a> {
    Target {
        image,
        id: &[0; ID_BYTES],
        write_through,
        counters,
    }
}

/// A request that is about to do some work with a range.
fn request(work: Work, bytes: u64) -> Request {
    Request {
        work,
        offset: 4096,
        bytes,
        ..Request::default()
    }
}

/// Carries a request on with the results of operations. Returns what the operations wrote, by place
/// and lengths, and the answer.
fn carry_on(
    request: &mut Request,
    target: &Target,
    results: &[i32],
) -> (Vec<(u64, Vec<usize>)>, Option<Answer>) {
    let mut all = Vec::new();
    for result in results {
        match request.ended(*result, target) {
            Next::Operation(operation) => all.extend(written(&operation)),
            Next::Answer(answer) => return (all, Some(answer)),
        }
    }
    (all, None)
}

fn written(operation: &Operation) -> Option<(u64, Vec<usize>)> {
    let Action::Write { pieces, count, .. } = operation.action else {
        return None;
    };
    // SAFETY: the request's, which lives.
    let pieces = unsafe { std::slice::from_raw_parts(pieces, count as usize) };
    let lengths = pieces.iter().map(|piece| piece.iov_len).collect();
    Some((operation.offset, lengths))
}

/// The rest of a transfer that is cut short is aligned, or there is none.
#[test]
fn a_direct_transfer_that_is_cut_short_goes_on_where_it_is_aligned() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(64 << 20).unwrap();
    let alignment = Alignment::new(4096, 512).unwrap();
    let image = Image::aligned(DiskConfig::plain(file), Some(alignment)).unwrap();
    let counters = DiskCounters::default();
    let target = target(&image, &counters, false);
    let mut zeroes = request(Work::Zero { unmap: false }, 10_240);
    let failed = [-libc::EOPNOTSUPP, 5000, 4096, 2048];
    let (written, answer) = carry_on(&mut zeroes, &target, &failed);
    let places = [
        (4096, vec![10_240]),
        (8192, vec![6144]),
        (12_288, vec![2048]),
    ];
    assert_eq!((written, answer), (places.into(), Some(Answer::Done(0))));
    let mut zeroes = request(Work::Zero { unmap: false }, 10_240);
    let (_, answer) = carry_on(&mut zeroes, &target, &[-libc::EOPNOTSUPP, 4095]);
    assert_eq!(answer, Some(Answer::Failed));
}

#[test]
fn zeroes_are_written_where_the_file_can_not_make_them() {
    let image = image();
    let counters = DiskCounters::default();
    let target = target(&image, &counters, false);
    for unmap in [false, true] {
        let mut request = request(Work::Zero { unmap }, (2 << 16) + 512);
        let results = [-libc::EOPNOTSUPP, (1 << 16) + 512, 1 << 16];
        let (written, answer) = carry_on(&mut request, &target, &results);
        assert_eq!(answer, Some(Answer::Done(0)));
        assert_eq!(written[0], (4096, vec![1 << 16, 1 << 16, 512]));
        let behind = 4096 + (1 << 16) + 512;
        assert_eq!(written[1], (behind, vec![(1 << 16) - 512, 512]));
    }
    assert_eq!(counters.zeroed_bytes.load(SeqCst), 2 * ((2 << 16) + 512));
    // A long range is written in parts.
    for refusal in [libc::EOPNOTSUPP, libc::EINVAL] {
        let mut request = request(Work::Zero { unmap: false }, MAX_RANGE_BYTES);
        let results: Vec<_> = std::iter::once(-refusal)
            .chain(std::iter::repeat_n(1 << 20, 64))
            .collect();
        let (written, answer) = carry_on(&mut request, &target, &results);
        assert_eq!((written.len(), answer), (64, Some(Answer::Done(0))));
        assert_eq!(written[63], (4096 + (63 << 20), vec![1 << 16; 16]));
    }
}

#[test]
fn a_discard_that_the_file_does_not_support_is_counted_and_well() {
    let image = image();
    let counters = DiskCounters::default();
    let target = target(&image, &counters, false);
    let mut ignored = request(Work::Discard, 4096);
    let (_, answer) = carry_on(&mut ignored, &target, &[-libc::EOPNOTSUPP]);
    assert_eq!(answer, Some(Answer::Done(0)));
    let mut failed = request(Work::Discard, 4096);
    let (_, answer) = carry_on(&mut failed, &target, &[-libc::EINTR, -libc::EIO]);
    assert_eq!(answer, Some(Answer::Failed));
    let counted = [&counters.discards_ignored, &counters.discarded_bytes];
    assert_eq!(counted.map(|counter| counter.load(SeqCst)), [1, 0]);
}

#[test]
fn a_driver_without_flushes_has_its_writes_made_stable() {
    let image = image();
    let counters = DiskCounters::default();
    for write_through in [false, true] {
        let target = target(&image, &counters, write_through);
        let stable_of = |next| match next {
            Next::Operation(Operation {
                action: Action::Write { stable, .. },
                ..
            }) => stable,
            other => panic!("{other:?}"),
        };
        let mut write = request(Work::Write, 512);
        assert_eq!(
            stable_of(write.operation(Work::Write, &target)),
            write_through
        );
        let mut zeroes = request(Work::Zero { unmap: false }, 512);
        assert_eq!(
            stable_of(zeroes.ended(-libc::EOPNOTSUPP, &target)),
            write_through
        );
        // What the file system clears is made stable by an operation of its own.
        let mut cleared = request(Work::Zero { unmap: false }, 512);
        let next = cleared.ended(0, &target);
        let flush = Next::Operation(Operation {
            offset: 4096,
            action: Action::Flush,
        });
        match write_through {
            true => assert_eq!(next, flush),
            false => assert_eq!(next, Next::Answer(Answer::Done(0))),
        }
    }
}
