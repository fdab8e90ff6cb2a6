//! A cpio archive in the "newc" form that Linux unpacks as an initramfs
//! (Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;

const MAGIC: &[u8] = b"070701";
const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_644;
const PROGRAM: u32 = 0o100_755;
const END: &str = "TRAILER!!!";

/// An archive being written. Paths may begin with a slash; folders above a file are made along.
#[derive(Clone, Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    paths: BTreeSet<String>,
}

impl Archive {
    /// Makes an empty archive.
    pub fn new() -> Self {
        Self::default()
    }

    /// A folder, and those above it. Once is enough.
    pub fn folder(&mut self, path: &str) {
        let path = relative(path);
        if path.is_empty() || self.paths.contains(path) {
            return;
        }
        self.folder_above(path);
        self.entry(path, DIRECTORY, &[]);
    }

    /// A file for reading.
    pub fn file(&mut self, path: &str, contents: &[u8]) {
        self.contents(path, FILE, contents);
    }

    /// A file for running.
    pub fn program(&mut self, path: &str, contents: &[u8]) {
        self.contents(path, PROGRAM, contents);
    }

    /// Whether the path is in it.
    pub fn contains(&self, path: &str) -> bool {
        self.paths.contains(relative(path))
    }

    /// The archive, ended. The kernel takes several one after another.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(END, 0, &[]);
        self.bytes
    }

    fn contents(&mut self, path: &str, mode: u32, contents: &[u8]) {
        let path = relative(path);
        self.folder_above(path);
        self.entry(path, mode, contents);
    }

    fn folder_above(&mut self, path: &str) {
        if let Some((above, _)) = path.rsplit_once('/') {
            self.folder(above);
        }
    }

    fn entry(&mut self, path: &str, mode: u32, contents: &[u8]) {
        self.entries += 1;
        let links = if mode == DIRECTORY { 2 } else { 1 };
        let length =
            |bytes: usize| u32::try_from(bytes).expect("a file of an initramfs is below 4 GiB");
        // inode, mode, uid, gid, links, mtime, size, device (2), special device (2), name's size
        // with its NUL, check.
        let fields = [
            self.entries,
            mode,
            0,
            0,
            links,
            0,
            length(contents.len()),
            0,
            0,
            0,
            0,
            length(path.len() + 1),
            0,
        ];
        self.bytes.extend_from_slice(MAGIC);
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
        self.paths.insert(path.to_owned());
    }

    /// Header with name, and contents, each end on a multiple of four.
    fn pad(&mut self) {
        let len = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(len, 0);
    }
}

fn relative(path: &str) -> &str {
    path.trim_matches('/')
}
