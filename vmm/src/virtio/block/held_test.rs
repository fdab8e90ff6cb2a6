//! Operations that wait until a test lets them go.
use std::{
    collections::VecDeque,
    os::fd::AsRawFd as _,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    time::Duration,
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{vectored::carry_out, *};

/// What holds operations back.
#[derive(Debug)]
pub(in super::super) struct Gate {
    open: AtomicBool,
    held: AtomicUsize,
    event: EventFd,
    /// Whether only the first buffer of a read is filled at a time.
    in_parts: bool,
}

impl PartialEq for Gate {
    fn eq(&self, other: &Gate) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Gate {}

impl Gate {
    pub(in super::super) fn shut(in_parts: bool) -> &'static Gate {
        Box::leak(Box::new(Gate {
            open: AtomicBool::new(false),
            held: AtomicUsize::new(0),
            event: EventFd::new(EFD_NONBLOCK).unwrap(),
            in_parts,
        }))
    }

    pub(in super::super) fn open(&self) {
        self.open.store(true, SeqCst);
        self.event.write(1).unwrap();
    }

    pub(in super::super) fn shut_again(&self) {
        self.open.store(false, SeqCst);
        let _ = self.event.read();
    }

    /// Number of operations that wait.
    pub(in super::super) fn held(&self) -> usize {
        self.held.load(SeqCst)
    }
}

pub(super) struct Held {
    image: Arc<Image>,
    gate: &'static Gate,
    waiting: VecDeque<(u16, Operation)>,
}

impl Held {
    pub(super) fn new(image: Arc<Image>, gate: &'static Gate) -> io::Result<Held> {
        Ok(Held {
            image,
            gate,
            waiting: VecDeque::new(),
        })
    }
}

impl FileIo for Held {
    fn begin(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn batch(&self) -> usize {
        8
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.gate.event.as_raw_fd())
    }

    unsafe fn push(&mut self, id: u16, operation: &Operation) {
        self.waiting.push_back((id, *operation));
        self.gate.held.store(self.waiting.len(), SeqCst);
    }

    fn submit(&mut self) {}

    fn has_result(&mut self) -> bool {
        self.gate.open.load(SeqCst) && !self.waiting.is_empty()
    }

    fn result(&mut self) -> Option<(u16, i32)> {
        if !self.has_result() {
            return None;
        }
        let (id, mut operation) = self.waiting.pop_front()?;
        self.gate.held.store(self.waiting.len(), SeqCst);
        if let Action::Read { count, .. } = &mut operation.action
            && self.gate.in_parts
        {
            *count = 1;
        }
        // SAFETY: the caller of `push` keeps the pieces until this result.
        Some((id, unsafe {
            carry_out(self.image.file.as_raw_fd(), &operation)
        }))
    }

    fn wait(&mut self) {
        while !self.has_result() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
