//! What is stable before it is answered, on a file whose fsync waits: by each method.
use super::{
    gated::{FUSE, Syncs, gated_file},
    *,
};

const HELD: Duration = Duration::from_millis(30);
const FLUSH_CHAIN: [Buffer; 2] = [(HEADER, 16, false), (STATUS, 1, true)];
const WRITE_CHAIN: [Buffer; 3] = [(HEADER, 16, false), (DATA, 512, false), (STATUS, 1, true)];

fn rig(method: Method, cache: Cache) -> (Rig, Syncs) {
    let (file, syncs) = gated_file((SECTORS * SECTOR_BYTES) as usize);
    let rig = Rig::by(method, |config| {
        config.file = file;
        config.cache = cache;
    });
    (rig, syncs)
}

/// Offers a request, which asks for a sync, and is answered with `status` when that has ended with
/// `errno`, and not before.
fn answered_after_the_sync(
    (rig, syncs): (&mut Rig, &Syncs),
    (kind, chain): (u32, &[Buffer]),
    (errno, status): (i32, u8),
) {
    let (before, asked) = (rig.used(), syncs.asked());
    let header = [u64::from(kind).to_le_bytes(), 3_u64.to_le_bytes()].concat();
    rig.put(HEADER, &header);
    rig.put(STATUS, &[0xee]);
    rig.offer(chain);
    rig.wait("the file is to be synced", |_| syncs.asked() == asked + 1);
    std::thread::sleep(HELD);
    assert_eq!(rig.used(), before, "it was answered before the sync");
    assert_eq!(rig.get(STATUS, 1), [0xee]);
    syncs.let_one_go(errno);
    rig.wait("an answer", |rig| rig.used() == before.wrapping_add(1));
    assert_eq!(rig.get(STATUS, 1), [status]);
    assert_eq!(syncs.asked(), asked + 1);
}

#[test]
fn no_answer_comes_before_the_file_is_synced() {
    slipgate_testbed::require_root_and_tun!();
    if !std::path::Path::new(FUSE).exists() {
        return slipgate_testbed::skipped!("there is no {FUSE}");
    }
    for method in [Method::IoUring, Method::Vectored] {
        // A flush, and not the write before it.
        let (mut rig, syncs) = self::rig(method, Cache::WriteBack);
        rig.activate(FLUSH);
        rig.put(DATA, &pattern(1, 512));
        assert_eq!(rig.ask(OUT, 3, &WRITE_CHAIN), (OK, 1));
        assert_eq!(syncs.asked(), 0, "{method:?}");
        let flush = (FLUSHING, &FLUSH_CHAIN[..]);
        answered_after_the_sync((&mut rig, &syncs), flush, (0, OK));
        answered_after_the_sync((&mut rig, &syncs), flush, (libc::EIO, IOERR));

        // Each write, of a disk that writes through, and for a driver that has no flushes.
        for (cache, features) in [(Cache::WriteThrough, FLUSH), (Cache::WriteBack, 0)] {
            let (mut rig, syncs) = self::rig(method, cache);
            rig.activate(features & rig.disk.features());
            let write = (OUT, &WRITE_CHAIN[..]);
            answered_after_the_sync((&mut rig, &syncs), write, (0, OK));
            answered_after_the_sync((&mut rig, &syncs), write, (libc::EIO, IOERR));
        }
    }
}
