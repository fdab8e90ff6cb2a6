use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixListener,
};

use super::*;

const SOON: Duration = Duration::from_secs(5);

/// A daemon that answers each request with the next of these, and is gone after the last.
fn daemon(path: &Path, answers: Vec<ClientAnswer>) -> thread::JoinHandle<()> {
    let listener = UnixListener::bind(path).unwrap();
    let path = path.to_owned();
    thread::spawn(move || {
        for answer in answers {
            let mut stream = listener.accept().unwrap().0;
            BufReader::new(&stream)
                .read_line(&mut String::new())
                .unwrap();
            serde_json::to_writer(&mut stream, &answer).unwrap();
            stream.write_all(b"\n").unwrap();
        }
        std::fs::remove_file(path).unwrap();
    })
}

/// What is said of a daemon with these answers, and how long that took.
fn ended(answers: Vec<ClientAnswer>, patience: Patience) -> (Result<u64, String>, Duration) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let daemon = daemon(&socket, answers);
    let asked = Instant::now();
    let ended = end_flows(&socket, "web", SOON, patience);
    let took = asked.elapsed();
    daemon.join().unwrap();
    (ended, took)
}

fn cut(flows: u64) -> ClientAnswer {
    ClientAnswer::Engine {
        reply: EngineReply::Cut { flows },
    }
}

#[test]
fn an_engine_that_is_replaced_is_asked_again() {
    let answers = vec![ClientAnswer::busy("the engine is started again"), cut(3)];
    assert_eq!(ended(answers, Patience::ForTheEngine).0, Ok(3));
}

#[test]
fn what_can_not_get_better_is_an_error_at_once() {
    let unknown = ClientAnswer::UnknownVm { served: vec![] };
    let refused = ClientAnswer::error("not allowed");
    for (answer, says) in [
        (unknown, "no VM \"web\""),
        (refused, "not allowed"),
        (ClientAnswer::Done, "another question"),
    ] {
        let (ended, took) = ended(vec![answer], Patience::ForTheEngine);
        let why = ended.unwrap_err();
        assert!(why.contains(says), "{why}");
        assert!(took < SOON / 2, "{took:?}");
    }
    // A daemon that has ended.
    let (gone, took) = ended(vec![], Patience::ForTheEngine);
    let why = gone.unwrap_err();
    assert!(why.contains("no daemon is at"), "{why}");
    assert!(took < SOON / 2, "{took:?}");
    // Between two questions.
    let busy = vec![ClientAnswer::busy("later")];
    let (gone, took) = ended(busy, Patience::ForTheEngine);
    assert!(gone.unwrap_err().contains("no daemon is at"));
    assert!(took < SOON / 2, "{took:?}");
}

#[test]
fn a_machine_that_resets_itself_waits_for_another_daemon() {
    let unknown = ClientAnswer::UnknownVm { served: vec![] };
    let answers = vec![unknown, cut(1)];
    assert_eq!(ended(answers, Patience::ForAnything).0, Ok(1));
}
