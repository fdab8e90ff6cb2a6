use std::{
    collections::VecDeque,
    io::{ErrorKind, Read as _, Write as _},
    os::{fd::BorrowedFd, unix::net::UnixStream},
    sync::{Arc, Mutex, MutexGuard},
};

use super::*;

/// A connector that a test plays, and what it does.
#[derive(Clone, Debug)]
pub(in super::super) struct Played {
    state: Arc<Mutex<State>>,
    bell: Arc<UnixStream>,
    rings: Arc<UnixStream>,
}

#[derive(Debug, Default)]
struct State {
    asked: Vec<(u32, u32)>,
    answers: VecDeque<Answer>,
    is_gone: bool,
}

impl Played {
    pub(in super::super) fn new() -> Played {
        let (bell, rings) = UnixStream::pair().unwrap();
        Played {
            state: Arc::default(),
            bell: Arc::new(bell),
            rings: Arc::new(rings),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Returns what was asked since the last call: numbers and ports.
    pub(in super::super) fn asked(&self) -> Vec<(u32, u32)> {
        std::mem::take(&mut self.state().asked)
    }

    pub(in super::super) fn answer(&self, id: u32, socket: Option<OwnedFd>) {
        self.state().answers.push_back(Answer { id, socket });
        self.ring();
    }

    /// Answers with a program's connection. Returns the program's end.
    pub(in super::super) fn connect(&self, id: u32) -> UnixStream {
        let (ours, program) = UnixStream::pair().unwrap();
        for end in [&ours, &program] {
            end.set_nonblocking(true).unwrap();
        }
        self.answer(id, Some(ours.into()));
        program
    }

    /// Ends. Answers that it gave are still read.
    pub(in super::super) fn go(&self) {
        self.state().is_gone = true;
        self.ring();
    }

    fn ring(&self) {
        (&*self.rings).write_all(b"!").unwrap();
    }
}

impl AsFd for Played {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl Connector for Played {
    fn ask(&self, id: u32, port: u32) -> io::Result<()> {
        let mut state = self.state();
        if state.is_gone {
            return Err(ErrorKind::BrokenPipe.into());
        }
        state.asked.push((id, port));
        Ok(())
    }

    fn next(&self) -> io::Result<Option<Answer>> {
        let mut state = self.state();
        match state.answers.pop_front() {
            None if state.is_gone => Err(ErrorKind::UnexpectedEof.into()),
            None => Ok(None),
            answer => {
                // No longer readable for it.
                (&*self.bell).read_exact(&mut [0])?;
                Ok(answer)
            }
        }
    }
}

#[test]
fn there_are_never_more_requests_than_the_connector_is_to_have() {
    let played = Played::new();
    let requests = Requests::new(Some(Box::new(played.clone())), ANSWERED_WITHIN);
    for _ in 0..3 {
        for _ in 0..MAX_REQUESTS {
            requests.ask(52).unwrap();
        }
        assert_eq!(requests.ask(52).unwrap_err(), Refusal::Full);
        let asked = played.asked();
        assert_eq!(asked.len(), MAX_REQUESTS);
        // One answer makes room for one request.
        played.answer(asked[0].0, None);
        assert_eq!(requests.next().unwrap().unwrap().id, asked[0].0);
        requests.ask(52).unwrap();
        assert_eq!(requests.ask(52).unwrap_err(), Refusal::Full);
        let last = played.asked();
        for (id, _) in asked[1..].iter().chain(&last) {
            played.answer(*id, None);
            requests.next().unwrap().unwrap();
        }
    }
    assert!(requests.next().unwrap().is_none());
}

#[test]
fn without_a_connector_or_behind_its_end_each_request_is_refused() {
    let none = Requests::new(None, ANSWERED_WITHIN);
    assert_eq!(none.ask(52).unwrap_err(), Refusal::Program);
    assert!(none.descriptor().is_none());

    let played = Played::new();
    let requests = Requests::new(Some(Box::new(played.clone())), ANSWERED_WITHIN);
    let (id, _) = requests.ask(52).unwrap();
    played.answer(id, None);
    played.go();
    assert!(requests.next().unwrap().is_some(), "what it said before");
    assert_eq!(requests.next().unwrap_err(), Refusal::Silence);
    assert_eq!(requests.ask(52).unwrap_err(), Refusal::Silence);
    assert!(requests.descriptor().is_none());
}
