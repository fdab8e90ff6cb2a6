use std::os::unix::fs::FileExt;

use super::*;
use crate::virtio::block::DiskConfig;

const BYTES: usize = 64 << 10;

fn pieces(buffers: &mut [&mut [u8]]) -> Vec<iovec> {
    let piece = |buffer: &mut &mut [u8]| iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    buffers.iter_mut().map(piece).collect()
}

/// Both methods do the same, some operations at once, and say which of them ended and how.
#[test]
fn operations_end_with_their_results() {
    for method in [Method::IoUring, Method::Vectored] {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; BYTES], 0).unwrap();
        let config = DiskConfig::plain(file.try_clone().unwrap());
        let image = Arc::new(Image::new(config).unwrap());
        let mut io = new(method, &image).unwrap();
        io.begin().unwrap();
        let (mut a, mut b) = (vec![1; 3000], vec![2; 1096]);
        let mut there = vec![0; 512];
        let written = pieces(&mut [&mut a, &mut b]);
        let read = pieces(&mut [&mut there]);
        let read = Action::Read {
            pieces: read.as_ptr(),
            count: 1,
        };
        let all = [
            (
                4096,
                Action::Write {
                    pieces: written.as_ptr(),
                    count: 2,
                    stable: true,
                },
            ),
            (8192, read),
            (BYTES as u64, read),
            (0, Action::Flush),
            (
                16_384,
                Action::Allocate {
                    mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                    bytes: 4096,
                },
            ),
            (
                0,
                Action::Allocate {
                    mode: -1,
                    bytes: 4096,
                },
            ),
        ];
        for (id, (offset, action)) in (10..).zip(all) {
            // SAFETY: the buffers live until all have ended.
            unsafe { io.push(id, &Operation { offset, action }) };
        }
        io.submit();
        let mut results = Vec::new();
        while results.len() < all.len() {
            io.wait();
            assert!(io.has_result());
            results.extend(std::iter::from_fn(|| io.result()));
        }
        results.sort_unstable();
        let expected = [
            (10, 4096),
            (11, 512),
            (12, 0),
            (13, 0),
            (14, 0),
            (15, -libc::EOPNOTSUPP),
        ];
        assert_eq!(results, expected, "{method:?}");
        assert!(!io.has_result());
        assert_eq!(there, [7; 512]);
        let mut on_disk = vec![0; 4096];
        file.read_exact_at(&mut on_disk, 4096).unwrap();
        assert_eq!(on_disk, [a, b].concat());
        file.read_exact_at(&mut on_disk, 16_384).unwrap();
        assert_eq!(on_disk, [0; 4096]);
    }
}
