//! A service manager that keeps descriptors for the next start (FDSTORE of sd_notify(3)).

use std::{
    fs,
    io::IoSliceMut,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
        unix::{fs::PermissionsExt as _, net::UnixDatagram},
    },
    sync::{Arc, Mutex},
};

use nix::{
    cmsg_space,
    fcntl::{FcntlArg, fcntl},
    sys::socket::{ControlMessageOwned, MsgFlags, recvmsg},
};
use slipgate_testbed::slipgate::{Start, binary};

/// Numbers that no shell and no descriptor of ours has.
const FROM: RawFd = 500;

type Kept = Arc<Mutex<Vec<Arc<OwnedFd>>>>;

pub(crate) struct Store {
    kept: Kept,
    scratch: tempfile::TempDir,
}

impl Store {
    pub(crate) fn new() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(scratch.path().join("notify")).unwrap();
        let kept = Kept::default();
        let theirs = kept.clone();
        std::thread::spawn(move || {
            while let Some((message, fds)) = receive(&socket) {
                let has = |line: &str| message.lines().any(|l| l == line);
                let mut kept = theirs.lock().unwrap();
                if has("FDSTORE=1") && has("FDNAME=slipgate") {
                    kept.extend(fds.into_iter().map(Arc::new));
                } else if has("FDSTOREREMOVE=1") && has("FDNAME=slipgate") {
                    kept.clear();
                }
                // The end of BARRIER=1 is closed here.
            }
        });
        Self { kept, scratch }
    }

    /// How many descriptors it has.
    pub(crate) fn len(&self) -> usize {
        self.kept.lock().unwrap().len()
    }

    /// A start that gets what is kept. Only a process itself knows its number before it is another
    /// program.
    pub(crate) fn start(&self, program: Option<std::path::PathBuf>) -> Start {
        let descriptors = self.kept.lock().unwrap().clone();
        let mut text = "#!/bin/bash\n".to_owned();
        for (at, fd) in descriptors.iter().enumerate() {
            let (at, fd) = (at + 3, fd.as_raw_fd());
            text += &format!("exec {at}<&{fd} {fd}<&-\n");
        }
        let count = descriptors.len();
        let names = vec!["slipgate"; count].join(":");
        text += &format!(
            "LISTEN_PID=$$ LISTEN_FDS={count} LISTEN_FDNAMES={names} exec {} \"$@\"\n",
            program.unwrap_or_else(|| binary().unwrap()).display()
        );
        let script = self.scratch.path().join("start");
        fs::write(&script, text).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
        let socket = self.scratch.path().join("notify").display().to_string();
        Start {
            binary: Some(script),
            environment: vec![("NOTIFY_SOCKET".to_owned(), socket)],
            descriptors,
            ..Start::default()
        }
    }
}

/// The next message with its descriptors.
fn receive(socket: &UnixDatagram) -> Option<(String, Vec<OwnedFd>)> {
    let mut buffer = [0; 1024];
    let mut space = cmsg_space!([RawFd; 253]);
    let mut parts = [IoSliceMut::new(&mut buffer)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags).ok()?;
    let mut fds = Vec::new();
    for message in received.cmsgs().ok()? {
        if let ControlMessageOwned::ScmRights(all) = message {
            for fd in all {
                // SAFETY: the kernel made it for this process just now.
                let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                let moved = fcntl(&fd, FcntlArg::F_DUPFD_CLOEXEC(FROM)).unwrap();
                // SAFETY: as above.
                fds.push(unsafe { OwnedFd::from_raw_fd(moved) });
            }
        }
    }
    let len = received.bytes;
    Some((String::from_utf8(buffer[..len].to_vec()).ok()?, fds))
}
