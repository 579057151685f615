//! A container engine that refuses whatever it is asked to create, and remembers what that was.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;

/// Newer than what clients know: they take the newest version of theirs.
const PING: &str = "200 OK\r\nApi-Version: 1.51\r\nOSType: linux";

pub(crate) struct Engine {
    socket: PathBuf,
    created: Arc<Mutex<Vec<Value>>>,
    serving: Option<JoinHandle<()>>,
}

impl Engine {
    /// Serves on this socket until it is dropped.
    pub(crate) fn at(socket: &Path) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let created = Arc::new(Mutex::new(Vec::new()));
        let asked = Arc::clone(&created);
        let serving = std::thread::spawn(move || {
            for client in listener.incoming() {
                match answer(client.unwrap(), &asked) {
                    Ok(true) => {}
                    Ok(false) => return,
                    Err(error) => panic!("the client was not understood: {error}"),
                }
            }
        });
        Self {
            socket: socket.to_owned(),
            created,
            serving: Some(serving),
        }
    }

    /// What `DOCKER_HOST` names it by.
    pub(crate) fn address(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    /// The containers that it was to create since the last time.
    pub(crate) fn asked_to_create(&self) -> Vec<Value> {
        std::mem::take(&mut *self.created.lock().unwrap())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A connection without a question ends it.
        drop(UnixStream::connect(&self.socket));
        if let Some(serving) = self.serving.take() {
            let served = serving.join();
            assert!(served.is_ok() || std::thread::panicking());
        }
    }
}

/// Answers one question; `false` if there is none.
fn answer(mut client: UnixStream, created: &Mutex<Vec<Value>>) -> io::Result<bool> {
    client.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut reader = BufReader::new(client.try_clone()?);
    let mut question = String::new();
    if reader.read_line(&mut question)? == 0 {
        return Ok(false);
    }
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        match line.to_lowercase().strip_prefix("content-length:") {
            Some(number) => length = number.trim().parse().unwrap(),
            None if line.trim().is_empty() => break,
            None => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let words: Vec<&str> = question.split(' ').collect();
    let path = words[1].split('?').next().unwrap_or_default();
    let (head, said) = if path.ends_with("/_ping") {
        (PING, "OK")
    } else if words[0] == "POST" && path.ends_with("/containers/create") {
        created.lock().unwrap().push(serde_json::from_slice(&body)?);
        ("500 Internal Server Error", r#"{"message":"seen"}"#)
    } else {
        ("404 Not Found", r#"{"message":"not served"}"#)
    };
    let length = said.len();
    let head = format!(
        "HTTP/1.1 {head}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    client.write_all(head.as_bytes())?;
    if words[0] != "HEAD" {
        client.write_all(said.as_bytes())?;
    }
    Ok(true)
}
