//! What a job asks for, in its comment or by `--gres=mps`. Pure.

use crate::limits::{LimitError, MemoryLimit, ThreadPercentage};

/// A word of a comment that begins like this is for us; all others are the user's own.
const PREFIX: &str = "cumps:";

/// A job that asks for a shared GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// A daemon for each GPU, and not one for all of them.
    pub per_gpu: bool,
    /// The most of a GPU's threads that a task may occupy.
    pub threads: Option<ThreadPercentage>,
    /// The most memory that a task may take on each GPU.
    pub memory: Option<MemoryLimit>,
}

/// Why a comment cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A part that we do not know.
    #[error(
        "{0:?} is not understood; a comment is cumps:share[,per-gpu][,threads=PCT][,memory=SIZE]"
    )]
    Unknown(String),
    /// `share` itself is missing.
    #[error("cumps: must begin with share, as in cumps:share,threads=40")]
    NoShare,
    /// A part that is there twice.
    #[error("{0:?} is there twice")]
    Twice(String),
    /// A limit that is none.
    #[error("{part:?}: {reason}")]
    Limit {
        /// The part.
        part: String,
        /// What is wrong with it.
        reason: LimitError,
    },
}

impl Request {
    /// What a job asks for by its comment, or by an `mps` resource, whose share of threads Slurm itself tells the tasks;
    /// `None` for a job that does not ask.
    pub fn of(comment: Option<&str>, has_mps: bool) -> Result<Option<Self>, RequestError> {
        let is_between = |letter: char| letter.is_whitespace() || letter == ';';
        let words = comment.into_iter().flat_map(|text| text.split(is_between));
        let mut ours = words.filter_map(|word| word.strip_prefix(PREFIX));
        let Some(parts) = ours.next() else {
            return Ok(has_mps.then(Self::default));
        };
        if ours.next().is_some() {
            return Err(RequestError::Twice(PREFIX.to_owned()));
        }
        let mut request = Self::default();
        let mut parts = parts.split(',');
        if parts.next() != Some("share") {
            return Err(RequestError::NoShare);
        }
        for part in parts {
            let limit = |reason| RequestError::Limit {
                part: part.to_owned(),
                reason,
            };
            let is_new = match part.split_once('=') {
                None if part == "per-gpu" => !std::mem::replace(&mut request.per_gpu, true),
                Some(("threads", value)) => request
                    .threads
                    .replace(value.parse().map_err(limit)?)
                    .is_none(),
                Some(("memory", value)) => request
                    .memory
                    .replace(value.parse().map_err(limit)?)
                    .is_none(),
                _ => return Err(RequestError::Unknown(part.to_owned())),
            };
            if !is_new {
                return Err(RequestError::Twice(part.to_owned()));
            }
        }
        Ok(Some(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(comment: &str) -> Result<Option<Request>, String> {
        Request::of(Some(comment), false).map_err(|error| error.to_string())
    }

    #[test]
    fn a_comment_asks_for_a_shared_gpu() {
        let shared = Request::default();
        assert_eq!(of("cumps:share"), Ok(Some(shared.clone())));
        assert_eq!(of("run 7;cumps:share for Ann"), Ok(Some(shared)));
        assert_eq!(
            of("cumps:share,memory=8G,per-gpu,threads=40"),
            Ok(Some(Request {
                per_gpu: true,
                threads: Some("40".parse().unwrap()),
                memory: Some("8192M".parse().unwrap()),
            }))
        );
    }

    #[test]
    fn other_comments_are_none_of_our_business() {
        for comment in [
            "",
            " ",
            "share",
            "cumps",
            "my cumps share",
            "CUMPS:share",
            "x-cumps:share",
        ] {
            assert_eq!(of(comment), Ok(None), "{comment:?}");
        }
        assert_eq!(Request::of(None, false), Ok(None));
    }

    #[test]
    fn an_mps_resource_asks_as_well() {
        assert_eq!(Request::of(None, true), Ok(Some(Request::default())));
        assert_eq!(
            Request::of(Some("for Ann"), true),
            Ok(Some(Request::default()))
        );
        let with_memory = Request::of(Some("cumps:share,memory=1G"), true)
            .unwrap()
            .unwrap();
        assert_eq!(with_memory.memory, Some("1G".parse().unwrap()));
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (comment, reason) in [
            (
                "cumps:",
                "cumps: must begin with share, as in cumps:share,threads=40",
            ),
            (
                "cumps:shared",
                "cumps: must begin with share, as in cumps:share,threads=40",
            ),
            (
                "cumps:threads=40",
                "cumps: must begin with share, as in cumps:share,threads=40",
            ),
            (
                "cumps:share,",
                "\"\" is not understood; a comment is cumps:share[,per-gpu][,threads=PCT][,memory=SIZE]",
            ),
            (
                "cumps:share,thread=4",
                "\"thread=4\" is not understood; a comment is cumps:share[,per-gpu][,threads=PCT][,memory=SIZE]",
            ),
            (
                "cumps:share,threads=400",
                "\"threads=400\": it must be a number from 1 to 100, such as 30 or 12.5",
            ),
            ("cumps:share,per-gpu,per-gpu", "\"per-gpu\" is there twice"),
            (
                "cumps:share,threads=1,threads=2",
                "\"threads=2\" is there twice",
            ),
            ("cumps:share cumps:share", "\"cumps:\" is there twice"),
        ] {
            assert_eq!(of(comment), Err(reason.to_owned()), "{comment}");
        }
    }
}
