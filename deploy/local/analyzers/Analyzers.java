package io.penstock.analysis;

import org.apache.lucene.analysis.Analyzer;
import org.apache.lucene.analysis.ar.ArabicAnalyzer;
import org.apache.lucene.analysis.cjk.CJKAnalyzer;
import org.apache.lucene.analysis.cz.CzechAnalyzer;
import org.apache.lucene.analysis.da.DanishAnalyzer;
import org.apache.lucene.analysis.de.GermanAnalyzer;
import org.apache.lucene.analysis.el.GreekAnalyzer;
import org.apache.lucene.analysis.en.EnglishAnalyzer;
import org.apache.lucene.analysis.es.SpanishAnalyzer;
import org.apache.lucene.analysis.fi.FinnishAnalyzer;
import org.apache.lucene.analysis.fr.FrenchAnalyzer;
import org.apache.lucene.analysis.hi.HindiAnalyzer;
import org.apache.lucene.analysis.hu.HungarianAnalyzer;
import org.apache.lucene.analysis.it.ItalianAnalyzer;
import org.apache.lucene.analysis.nl.DutchAnalyzer;
import org.apache.lucene.analysis.no.NorwegianAnalyzer;
import org.apache.lucene.analysis.pt.PortugueseAnalyzer;
import org.apache.lucene.analysis.ro.RomanianAnalyzer;
import org.apache.lucene.analysis.ru.RussianAnalyzer;
import org.apache.lucene.analysis.sv.SwedishAnalyzer;
import org.apache.lucene.analysis.tr.TurkishAnalyzer;
import org.elasticsearch.plugin.NamedComponent;
import org.elasticsearch.plugin.analysis.AnalyzerFactory;

/** Lucene's analyzers under the names that a full Elasticsearch gives them, for the small distribution. */
public final class Analyzers {
    private Analyzers() {}

    @NamedComponent("arabic")
    public static final class Arabic implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new ArabicAnalyzer();
        }
    }

    @NamedComponent("cjk")
    public static final class Cjk implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new CJKAnalyzer();
        }
    }

    @NamedComponent("czech")
    public static final class Czech implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new CzechAnalyzer();
        }
    }

    @NamedComponent("danish")
    public static final class Danish implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new DanishAnalyzer();
        }
    }

    @NamedComponent("dutch")
    public static final class Dutch implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new DutchAnalyzer();
        }
    }

    @NamedComponent("english")
    public static final class English implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new EnglishAnalyzer();
        }
    }

    @NamedComponent("finnish")
    public static final class Finnish implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new FinnishAnalyzer();
        }
    }

    @NamedComponent("french")
    public static final class French implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new FrenchAnalyzer();
        }
    }

    @NamedComponent("german")
    public static final class German implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new GermanAnalyzer();
        }
    }

    @NamedComponent("greek")
    public static final class Greek implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new GreekAnalyzer();
        }
    }

    @NamedComponent("hindi")
    public static final class Hindi implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new HindiAnalyzer();
        }
    }

    @NamedComponent("hungarian")
    public static final class Hungarian implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new HungarianAnalyzer();
        }
    }

    @NamedComponent("italian")
    public static final class Italian implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new ItalianAnalyzer();
        }
    }

    @NamedComponent("norwegian")
    public static final class Norwegian implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new NorwegianAnalyzer();
        }
    }

    @NamedComponent("portuguese")
    public static final class Portuguese implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new PortugueseAnalyzer();
        }
    }

    @NamedComponent("romanian")
    public static final class Romanian implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new RomanianAnalyzer();
        }
    }

    @NamedComponent("russian")
    public static final class Russian implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new RussianAnalyzer();
        }
    }

    @NamedComponent("spanish")
    public static final class Spanish implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new SpanishAnalyzer();
        }
    }

    @NamedComponent("swedish")
    public static final class Swedish implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new SwedishAnalyzer();
        }
    }

    @NamedComponent("turkish")
    public static final class Turkish implements AnalyzerFactory {
        @Override
        public Analyzer create() {
            return new TurkishAnalyzer();
        }
    }
}
